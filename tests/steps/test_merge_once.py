# SPDX-License-Identifier: Apache-2.0
"""The last layer's streams are merged once, for the draft model and the head."""

from typing import Any

import pytest
import torch
from helpers import layout
from helpers.pipeline_stages import AUXILIARY, TOKENS, run, stage_of_model


def test_a_layer_is_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stage_of_model("dspark")
    kind = layout.module(layout.MODEL).DeepseekV4DecoderLayer
    merge, merged = kind.hc_post, []

    def counted(layer: Any, *args: torch.Tensor) -> torch.Tensor:
        merged.append(layer)
        result: torch.Tensor = merge(layer, *args)
        return result

    monkeypatch.setattr(kind, "hc_post", counted)
    run(made, 0, 1)
    assert len(merged) == len(AUXILIARY), (
        f"{len(AUXILIARY)} layers are merged {len(merged)} times"
    )


@pytest.mark.unchanged
def test_the_head_gets_the_same() -> None:
    """Whether the draft model reads the last layer or not."""
    made = stage_of_model("dspark")
    states, auxiliary = run(made, 0, 1)
    assert len(auxiliary) == len(AUXILIARY)
    without, first = run(made, 0, 1, auxiliary=AUXILIARY[:1])
    assert states.shape[0] == TOKENS
    assert torch.equal(states, without)
    assert torch.equal(first[0], auxiliary[0])
