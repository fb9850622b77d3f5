# SPDX-License-Identifier: Apache-2.0
"""V4.1's indexer keeps to blocks of keys that an earlier one chose: the kernels of all
platforms choose and mask them on XPU."""

import math
from typing import Any

import pytest
import torch
from helpers import layout

MODULE = "vllm.model_executor.kernels.attention.dsa.candidate_blocks"
ROWS, WIDTH, BLOCK, BLOCKS = 5, 203, 8, 4
STARTS = torch.tensor([0, 0, 50, 50, 120], dtype=torch.int32)
ENDS = torch.tensor([3, 50, 90, 120, 203], dtype=torch.int32)


def admitted(function: str, *args: Any) -> None:
    try:
        getattr(layout.module(MODULE), function)(*args)
    except AssertionError:
        pytest.fail(f"{function} admits no tensor of XPU")


def scores(starts: torch.Tensor | None) -> torch.Tensor:
    """Scores of rows; what is beyond a row's bounds is the largest."""
    torch.manual_seed(3)
    logits = torch.randn(ROWS, WIDTH)
    for row in range(ROWS):
        logits[row, ENDS[row] :] = 99.0
        if starts is not None:
            logits[row, : starts[row]] = 99.0
    return logits.to(layout.device())


def best(logits: torch.Tensor, starts: torch.Tensor | None) -> list[set[int]]:
    """Of each row the blocks with the largest score, the newest among them."""
    chosen = []
    for row in range(ROWS):
        start = int(starts[row]) if starts is not None else 0
        own = logits[row, start : int(ENDS[row])].cpu()
        tops = [float(block.max()) for block in own.split(BLOCK)]
        tops[-1] = math.inf
        order = sorted(range(len(tops)), key=lambda block: -tops[block])
        chosen.append(set(order[:BLOCKS]))
    return chosen


@pytest.mark.parametrize("starts", [STARTS, None], ids=["prefill", "decode"])
def test_blocks_with_the_largest_scores(starts: torch.Tensor | None) -> None:
    logits = scores(starts)
    out = torch.full((ROWS, BLOCKS), 7, dtype=torch.int32, device=logits.device)
    given = None if starts is None else starts.to(logits.device)
    ends = ENDS.to(logits.device)
    admitted("select_candidate_blocks", logits, given, ends, BLOCKS, BLOCK, out)
    found = [{b for b in row if b >= 0} for row in out.tolist()]
    assert found == best(logits, starts)


@pytest.mark.parametrize("starts", [STARTS, None], ids=["prefill", "decode"])
def test_other_scores_are_masked(starts: torch.Tensor | None) -> None:
    logits = scores(starts)
    before = logits.clone()
    chosen = best(logits, starts)
    blocks = torch.full((ROWS, BLOCKS), -1, dtype=torch.int32)
    for row, own in enumerate(chosen):
        blocks[row, : len(own)] = torch.tensor(sorted(own))
    given = None if starts is None else starts.to(logits.device)
    args = (given, ENDS.to(logits.device), blocks.to(logits.device), BLOCK)
    admitted("apply_candidate_mask", logits, *args)
    for row, own in enumerate(chosen):
        start = int(starts[row]) if starts is not None else 0
        kept = torch.zeros(WIDTH, dtype=torch.bool)
        for block in own:
            first = start + block * BLOCK
            kept[first : min(first + BLOCK, int(ENDS[row]))] = True
        assert torch.equal(logits[row, kept], before[row, kept])
        assert (logits[row, ~kept] == -math.inf).all()


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_keep_the_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layout.module(MODULE)
    if hasattr(module, "current_platform"):
        other = layout.another_platform(module.current_platform)
        monkeypatch.setattr(module, "current_platform", other)
    logits = torch.zeros(1, 8)
    ends = torch.ones(1, dtype=torch.int32)
    with pytest.raises(AssertionError):
        module.apply_candidate_mask(logits, None, ends, ends[None], BLOCK)
