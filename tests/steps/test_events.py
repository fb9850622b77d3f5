# SPDX-License-Identifier: Apache-2.0
"""Building a layer does not change `torch.cuda.Event`, which the model runner set."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers


class Event:
    """An event; `replaced` tells of each whether `torch.cuda.Event` then was the class
    of XPU, which the runner never puts there as it is."""

    replaced: list[bool] = []  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.replaced.append(torch.cuda.Event is torch.xpu.Event)


class XpuEvent(Event):
    pass


@pytest.mark.parametrize("compress_ratio", layout.COMPRESS_RATIOS)
def test_the_runners_event_stays(
    compress_ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert layout.device()  # the platform is chosen before anything is replaced
    monkeypatch.setattr(Event, "replaced", [])
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.xpu, "Event", XpuEvent)
    model_layers.attention_layer(model_configs.vllm_config(), compress_ratio)
    assert not any(Event.replaced), (
        f"torch.cuda.Event was replaced while {len(Event.replaced)} were made"
    )
