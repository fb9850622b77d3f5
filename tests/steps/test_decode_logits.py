# SPDX-License-Identifier: Apache-2.0
"""The indexer scores as many decode rows at once as its bound of memory holds."""

from typing import Any

import pytest
import torch
from helpers import layout
from helpers.indexer_batch import Batch

BOUND = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
ENTRIES = 1 << 20
"""Of a context of a million tokens at ratio 1: a row has 4 MiB of scores."""
LENS = (300, 70, 9, 131, 600)
OPS = {False: "xpu_fp8_paged_mqa_logits", True: "mxfp4_paged_mqa_logits"}
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"


def watched(fp4: bool, found: list[int], patch: pytest.MonkeyPatch) -> None:
    """Note the bytes of all scores that are made."""
    place: Any = layout.module(INDEXER) if fp4 else torch.ops.vllm
    op = getattr(place, OPS[fp4])

    def score(*args: Any) -> torch.Tensor:
        logits: torch.Tensor = op(*args)
        found.append(logits.nbytes)
        return logits

    patch.setattr(place, OPS[fp4], score)


def decoded(
    megabytes: int, patch: pytest.MonkeyPatch, fp4: bool = False, **candidates: Any
) -> tuple[Batch, list[int]]:
    """A decode step of five requests, and the bytes of its scores."""
    patch.setattr(layout.module("vllm.envs"), BOUND, megabytes)
    batch = Batch(LENS, (1,) * len(LENS), fp4=fp4)
    op = batch.indexer.indexer_op
    op.max_model_len = ENTRIES
    for name, value in candidates.items():
        setattr(op, name, value)
    found: list[int] = []
    with patch.context() as inner:
        watched(fp4, found, inner)
        batch.check() if not candidates else batch.run()
    return batch, found


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "mxfp4"])
@pytest.mark.parametrize(("megabytes", "rows"), [(4, 1), (9, 2), (19, 4)])
def test_scores_stay_within_the_bound(
    megabytes: int, rows: int, fp4: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = decoded(megabytes, monkeypatch, fp4)
    assert max(found) == 4 * ENTRIES * rows, f"{max(found)} bytes of {megabytes} MiB"
    assert sum(found) == 4 * ENTRIES * len(LENS)


def test_a_row_alone_may_be_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = decoded(1, monkeypatch)
    assert found == [4 * ENTRIES] * len(LENS), f"{max(found)} bytes of 1 MiB"


@pytest.mark.parametrize("writes", [True, False], ids=["chooses", "keeps to"])
def test_candidates_are_those_of_each_row(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a row, and what is chosen in them, do not depend on the bound."""
    if not hasattr(layout.module(INDEXER), "_select_candidate_blocks"):
        pytest.skip("the release's indexer has no candidate blocks")
    results = []
    for megabytes in (20, 4):
        torch.manual_seed(1)
        blocks = torch.randint(0, 5, (len(LENS), 4), dtype=torch.int32)
        batch, found = decoded(
            megabytes,
            monkeypatch,
            candidate_blocks=blocks.to(layout.device()),
            candidate_block_size=8,
            candidate_write=writes,
        )
        results.append((batch.chosen.cpu(), batch.indexer.indexer_op.candidate_blocks))
    assert len(found) == len(LENS), f"{found} bytes of 4 MiB"
    for once, in_parts in zip(*results, strict=True):
        assert torch.equal(once.sort().values, in_parts.cpu().sort().values)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_score_all_rows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = layout.module(INDEXER)
    other = layout.another_platform(module.current_platform)
    batch = Batch(LENS, (1,) * len(LENS))
    batch.indexer.indexer_op.max_model_len = ENTRIES
    monkeypatch.setattr(layout.module("vllm.envs"), BOUND, 4)
    monkeypatch.setattr(module, "current_platform", other)
    found: list[int] = []

    def score(q: Any, *_: Any, **__: Any) -> torch.Tensor:
        found.append(len(q[0]))
        raise StopIteration

    monkeypatch.setattr(module, "fp8_fp4_paged_mqa_logits", score)
    with pytest.raises(StopIteration):
        batch.run()
    assert found == [len(LENS)]
