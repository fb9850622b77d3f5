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
        kept[: starts[row] if starts is not None else 0] = True
        kept[ENDS[row] :] = True
        assert (logits[row, ~kept] == -math.inf).all(), "of the row's own"


WIDE, SHORT = 65_536, (5, 1030)
"""Columns of a server's longest request, and how many of them two requests have."""
UNWRITTEN = 77


def noting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What a function of torch allocates, filled with `UNWRITTEN`."""
    allocate, made = getattr(owner, name), []

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(allocate(*args, **kwargs).fill_(UNWRITTEN))
        return made[-1]

    monkeypatch.setattr(owner, name, filled)
    return made


def written(tensor: torch.Tensor) -> list[int]:
    """How many values each row got."""
    return (tensor != UNWRITTEN).sum(1).tolist()


@pytest.mark.parametrize("repeat", [1, 2])
def test_blocks_are_scored_up_to_the_end_of_a_row(
    repeat: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = layout.device()
    ends = torch.tensor(SHORT, dtype=torch.int32, device=device)
    logits = torch.rand(2 * repeat, WIDE, device=device)
    logits[-1, 21] = torch.nan
    out = torch.zeros(2 * repeat, BLOCKS, dtype=torch.int32, device=device)
    made, sorted_ = noting(monkeypatch, torch.Tensor, "new_empty"), list[int]()
    topk = torch.Tensor.topk

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sorted_.append(self.shape[-1])
        return topk(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", noted)
    args = (logits, None, ends, BLOCKS, BLOCK, out, repeat)
    admitted("select_candidate_blocks", *args)
    blocks = [-(-end // BLOCK) for end in SHORT for _ in range(repeat)]
    shape = len(logits), WIDE // BLOCK
    scored = [written(tensor) for tensor in made if tensor.shape == shape]
    assert blocks in scored
    assert max(sorted_, default=0) <= max(blocks)
    assert out[0].tolist() == [0, -1, -1, -1]
    # Its newest, and one that has a value which is not a number.
    assert {blocks[-1] - 1, 21 // BLOCK} <= set(out[-1].tolist())


@pytest.mark.parametrize("repeat", [1, 2])
def test_scores_are_masked_up_to_the_end_of_a_row(
    repeat: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = layout.device()
    ends = torch.tensor(SHORT, dtype=torch.int32, device=device)
    logits = torch.full((2 * repeat, WIDE), float(UNWRITTEN), device=device)
    blocks = torch.tensor([[0, -1], [128, 3]], dtype=torch.int32, device=device)
    blocks = blocks.repeat_interleave(repeat, 0)
    made = noting(monkeypatch, torch, "empty")
    admitted("apply_candidate_mask", logits, None, ends, blocks, BLOCK, repeat)
    tile = 1024
    for row, count in enumerate(written(logits)):
        end = SHORT[row // repeat]
        assert count <= -(-end // tile) * tile, "columns written"
        kept = [0] if row < repeat else [128, 3]
        for block in range(-(-end // BLOCK)):
            own = logits[row, block * BLOCK : min((block + 1) * BLOCK, end)]
            assert (own == (UNWRITTEN if block in kept else -math.inf)).all(), block
    (flags,) = (tensor for tensor in made if tensor.ndim == 2)
    for row, count in enumerate(written(flags)):
        assert count <= -(-SHORT[row // repeat] // BLOCK) + 2, "flags written"


@pytest.mark.parametrize("repeat", [1, 2])
def test_masks_of_rows_that_reach_the_last_column(
    repeat: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate behind it stands for it. Bounds and columns have strides."""
    device, last = layout.device(), WIDTH - 1
    bounds = [(0, WIDTH), (40, WIDTH), (120, 160), (40, WIDTH)]
    own = [[0, 3], [2, 30], [1, -1], [2, 1]]
    starts, ends = torch.tensor(bounds, dtype=torch.int32, device=device).unbind(1)
    blocks = torch.tensor(own, dtype=torch.int32, device=device)
    whole = torch.full((4 * repeat, 2 * WIDTH), float(UNWRITTEN), device=device)
    made = noting(monkeypatch, torch, "empty")
    args = (starts, ends, blocks.repeat_interleave(repeat, 0), BLOCK, repeat)
    admitted("apply_candidate_mask", whole[:, ::2], *args)
    assert (whole[:, 1::2] == UNWRITTEN).all()
    (flags,) = (tensor for tensor in made if tensor.ndim == 2)
    for row, count in enumerate(written(flags)):
        (start, end), kept = bounds[row // repeat], own[row // repeat]
        assert count <= -(-(end - start) // BLOCK) + 2, "flags written"
        for column in range(start, end):
            stays = (column - start) // BLOCK in kept or (30 in kept and column == last)
            wanted = UNWRITTEN if stays else -math.inf
            assert whole[row, 2 * column] == wanted, (row, column)


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
    with pytest.raises(AssertionError):
        module.select_candidate_blocks(logits, None, ends, 1, BLOCK, ends[None])


def test_a_long_row_behind_others() -> None:
    """More tiles than a row has programs, from the tile of its first column on."""
    device, start, end = layout.device(), 5000, 60_003
    bounds = [torch.tensor([x], dtype=torch.int32, device=device) for x in (start, end)]
    logits = torch.full((1, WIDE), float(UNWRITTEN), device=device)
    chosen = [0, 4100, (end - start - 1) // BLOCK]
    blocks = torch.tensor([chosen], dtype=torch.int32, device=device)
    admitted("apply_candidate_mask", logits, *bounds, blocks, BLOCK)
    kept = {start + block * BLOCK + at for block in chosen for at in range(BLOCK)}
    found = (logits[0, start:end] == UNWRITTEN).nonzero()[:, 0] + start
    assert set(found.tolist()) == {column for column in kept if column < end}
    assert (logits[0, : start - 1024] == UNWRITTEN).all(), "columns written"
    assert (logits[0, end + 1024 :] == UNWRITTEN).all(), "columns written"
    logits = torch.rand(1, WIDE, device=device)
    # Each in a tile of blocks that one program scores after others.
    best = [4097, 6100, 6700]
    for block in best:
        logits[0, start + block * BLOCK] = 2.0
    out = torch.zeros(1, BLOCKS, dtype=torch.int32, device=device)
    admitted("select_candidate_blocks", logits, *bounds, BLOCKS, BLOCK, out)
    assert set(out[0].tolist()) == {*best, chosen[-1]}
