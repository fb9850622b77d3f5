# SPDX-License-Identifier: Apache-2.0
"""A draft model on the last pipeline stage gets the hidden states of earlier stages."""

from types import SimpleNamespace

import pytest
import torch
from helpers import layout
from helpers.pipeline_stages import EAGLE, TOKENS, run, stage, stage_of_model

STAGES = 2


def test_auxiliary_states_cross_the_stages() -> None:
    states, auxiliary = run(stage_of_model("dspark"), 0, 1)
    sent = run(stage_of_model("dspark", 0, STAGES), 0, STAGES)
    got_states, got = run(stage_of_model("dspark", 1, STAGES), 1, STAGES, sent)
    assert torch.equal(got_states, states)
    assert len(got) == len(auxiliary), (
        f"{len(got)} of {len(auxiliary)} auxiliary hidden states reach the draft model"
    )
    assert all(map(torch.equal, got, auxiliary))


def test_the_target_says_that_it_sends_them() -> None:
    verify = layout.module(f"{EAGLE}.eagle3_utils")
    target = SimpleNamespace(model=stage_of_model("dspark", 1, STAGES))
    verify.verify_supports_aux_hidden_states_over_pp(target, "dspark")


def test_the_last_stage_has_the_embedding() -> None:
    target = stage_of_model("dspark", 1, STAGES)
    draft = SimpleNamespace(has_own_embed_tokens=False)
    inner = SimpleNamespace(embed_tokens=torch.nn.Embedding(2, 2))
    with stage(1, STAGES):
        layout.module(f"{EAGLE}.utils").maybe_share_target_embed(draft, inner, target)
    assert inner.embed_tokens is target.embed_tokens


@pytest.mark.unchanged
@pytest.mark.parametrize("method", [None, "mtp"])
def test_other_last_stages_have_no_embedding(method: str | None) -> None:
    """A draft of multi-token prediction loads its own: step `mtp-embedding`."""
    target = stage_of_model(method, 1, STAGES)
    missing = layout.module("vllm.model_executor.models.utils").PPMissingLayer
    assert isinstance(target.embed_tokens, missing)
    sent = run(stage_of_model(method, 0, STAGES), 0, STAGES)
    assert sent["hidden_states"].shape == (TOKENS, 4, 256)
