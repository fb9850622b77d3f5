# SPDX-License-Identifier: Apache-2.0
"""The start refuses expert load balancing, which XPU's model cannot do."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers


class Nothing(torch.nn.Module):
    """In place of attention and experts, which have no part in this."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def build(monkeypatch: pytest.MonkeyPatch, *, eplb: bool) -> Any:
    config = model_configs.vllm_config()
    config.parallel_config.enable_expert_parallel = True
    config.parallel_config.enable_eplb = eplb
    model = layout.module(layout.MODEL)
    monkeypatch.setattr(model, model_layers.attention_class().__name__, Nothing)
    monkeypatch.setattr(model, "DeepseekV4MoE", Nothing)
    with model_configs.current(config):
        return model.DeepseekV4Model(vllm_config=config, prefix="model")


def test_the_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="Drop --enable-eplb"):
        build(monkeypatch, eplb=True)


@pytest.mark.unchanged
def test_expert_parallelism_alone_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(monkeypatch, eplb=False).layers
