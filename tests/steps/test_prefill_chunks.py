# SPDX-License-Identifier: Apache-2.0
"""Prefill gathers as many requests at a time as fit into the memory reserved for it."""

from typing import Any

import pytest
from helpers import attention_batch, layout
from helpers import reference_attention as reference
from helpers.attention_batch import NO_SINKS, Batch

TOLERANCE = 4e-3
COMBINE = "combine_topk_swa_indices"
"""Each round calls it."""


def rounds_of(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many rounds the batch takes, after a check of their results."""
    module = layout.prefill_module(batch.layer)
    # An attribute of the layer where a release has layers with other functions.
    owner: Any = batch.layer if hasattr(batch.layer, COMBINE) else module
    combine, rounds = getattr(owner, COMBINE), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        rounds.append(COMBINE)
        return combine(*args, **kwargs)

    monkeypatch.setattr(owner, COMBINE, counted)
    output = batch.forward()
    assert reference.relative(output, batch.expected(NO_SINKS)) < TOLERANCE
    return len(rounds)


@pytest.mark.parametrize("ratio", attention_batch.RATIOS)
def test_short_requests_are_gathered_at_once(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (131, 2, 9, 7, 5)
    batch = Batch(ratio, lengths, (2, 2, 3, 2, 2), sinks=NO_SINKS)
    rounds = rounds_of(batch, monkeypatch)
    assert rounds == 1, (
        f"gathers the keys of {len(lengths)} requests in {rounds} rounds"
    )


def test_what_does_not_fit_waits_for_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batch(0, (140,) * 5, (2,) * 5, sinks=NO_SINKS)
    window, tokens = batch.layer.window_size, batch.layer.max_num_batched_tokens
    monkeypatch.setattr(batch.layer, "PREFILL_CHUNK_SIZE", 1)
    # A round may not take what decode reserves.
    monkeypatch.setattr(batch.layer, "decode_workspace_size", 1, raising=False)
    fit = (window + tokens) // (window + 1)
    assert fit < 5, "all would fit"
    rounds = rounds_of(batch, monkeypatch)
    want = -(-5 // fit)
    assert rounds == want, f"gathers the keys of 5 requests in {rounds} rounds"
