# SPDX-License-Identifier: Apache-2.0
"""The sparse indexer chooses the best keys, wherever their pages lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import attention_batch, layout
from helpers import reference_attention as reference
from helpers.indexer_batch import RATIO, TOPK, Batch
from helpers.kernel_trace import traced

# Pages of 64 keys take 8,640 bytes: this one lies beyond 2^31.
FAR = 2**31 // 8640 + 1
ops = layout.module(layout.OPS)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        pytest.param((300, 70, 3), (1, 1, 1), id="decode"),
        pytest.param((270, 90, 40), (1, 6, 5), id="mixed"),
    ],
)
def test_the_best_keys_beyond_two_gigabytes(
    seq_lens: tuple[int, ...], query_lens: tuple[int, ...]
) -> None:
    Batch(seq_lens, query_lens, first_page=FAR).check()


def test_a_decode_takes_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch((300, 70), (1, 1))
    launches: list[str] = []

    @contextmanager
    def watch() -> Iterator[None]:
        with traced(monkeypatch) as trace:
            yield
        launches.extend(trace.launches)

    batch.run(watch())
    assert launches == ["_indexer_q_kernel", "paged_mqa_logits_kernel"]


def combine(**changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that two requests of 8 and 12 tokens read, of 3 and 2 new ones."""
    arguments = {
        "topk_indices": torch.tensor([[0, 1]] * 5, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32),
        "seq_lens": torch.tensor([8, 12], dtype=torch.int32),
        "gather_lens": torch.tensor([8, 12], dtype=torch.int32),
        **changes,
    }
    moved = {name: value.to(layout.device()) for name, value in arguments.items()}
    indices, lens = ops.combine_topk_swa_indices(
        **moved, window_size=8, compress_ratio=RATIO, topk=TOPK, M=20, N=4
    )
    return indices.cpu(), lens.cpu()


def test_no_choice_never_means_the_row_of_another_request() -> None:
    # Tokens 3 and 4, of the second request, see two and three entries.
    indices, _ = combine(topk_indices=torch.full((5, 3), -1, dtype=torch.int32))
    compressed = indices[3, :2].tolist() + indices[4, :3].tolist()
    assert compressed == [-1] * 5, f"rows {compressed}"


def test_no_page_never_means_a_slot() -> None:
    table = torch.tensor([[3, -1]], dtype=torch.int32, device=layout.device())
    chosen = torch.tensor([[1, 5, -1]], dtype=torch.int32, device=layout.device())
    request = torch.zeros(1, dtype=torch.int32, device=layout.device())
    valid = torch.ones(1, dtype=torch.bool, device=layout.device())
    slots, lens = ops.compute_global_topk_indices_and_lens(
        chosen, request, table, 4, valid
    )
    assert slots.tolist() == [[13, -1, -1]], f"slots {slots.tolist()}"
    assert lens.tolist() == [1]


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_combined_rows() -> None:
    """Each token reads its chosen entries, then the raw tokens of its window."""
    indices, lens = combine(topk_indices=torch.tensor([[0, 1, 2]] * 5).int())
    tokens = [(0, 5), (0, 6), (0, 7), (1, 10), (1, 11)]
    for token, (request, position) in enumerate(tokens):
        recent = range(max(position - 7, 0), position + 1)
        wanted = [*range((position + 1) // RATIO), *(4 + i for i in recent)]
        assert int(lens[token]) == len(wanted)
        got = indices[token, : len(wanted)].tolist()
        assert got == [20 * request + row for row in wanted]


@pytest.mark.unchanged
def test_decode_beside_a_prompt() -> None:
    """Decode rows of a mixed batch read the request that they belong to."""
    sinks = attention_batch.NO_SINKS
    batch = attention_batch.Batch(4, (131, 259), (1, 2), sinks=sinks)
    expected = batch.expected(sinks)
    assert reference.relative(batch.forward(), expected) < 4e-3


@pytest.mark.unchanged
def test_other_platforms_keep_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    op = layout.module("vllm.model_executor.layers.sparse_attn_indexer")
    calls: list[str] = []

    def logits(name: str) -> Any:
        def run(q: Any, kv: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            keys = len(kv[0]) if isinstance(kv, tuple) else kwargs["max_model_len"]
            return torch.zeros(len(weights), keys)

        return run

    batch = Batch((70, 40), (1, 5))
    other = layout.another_platform(op.current_platform)
    monkeypatch.setattr(op, "current_platform", other)
    monkeypatch.setattr(op, "ops", layout.module("vllm._custom_ops"), raising=False)
    for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"):
        monkeypatch.setattr(op, name, logits(name))
    indexer_op = batch.indexer.indexer_op
    monkeypatch.setattr(indexer_op, "forward", indexer_op.forward_cuda)
    batch.run()
    assert calls == ["fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"]
