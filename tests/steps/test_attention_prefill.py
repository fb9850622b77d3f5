# SPDX-License-Identifier: Apache-2.0
"""Prefill attends to the gathered keys with the sink, up to each token's length, in
memory reserved beforehand."""

import functools
from typing import Any

import pytest
import torch
from helpers import attention_batch, kernel_trace, layout
from helpers import reference_attention as reference
from helpers.attention_batch import NO_SINKS, Batch, random_sinks, sink_report

TOLERANCE = 4e-3


@functools.cache
def traced_run(ratio: int) -> tuple[Batch, torch.Tensor, kernel_trace.Trace]:
    """A batch with sinks, its output, and what was done for it."""
    batch = Batch(ratio, (260, 9), (2, 2), sinks=random_sinks())
    with (
        batch.ready() as run,
        pytest.MonkeyPatch.context() as patch,
        kernel_trace.traced(patch) as trace,
    ):
        output = run()
    return batch, output, trace


@layout.unchanged_with_xpu_folder
@pytest.mark.parametrize("ratio", attention_batch.RATIOS)
def test_sinks_weigh_in(ratio: int) -> None:
    batch, output, _ = traced_run(ratio)
    sinks = random_sinks()
    report = sink_report(batch, output, sinks)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE, report


@layout.unchanged_with_xpu_folder
def test_prefill_and_decode_in_one_batch() -> None:
    sinks = random_sinks()
    batch = Batch(128, (131, 259), (1, 2), sinks=sinks)
    output = batch.forward()
    report = sink_report(batch, output, sinks)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE, report


@layout.unchanged_since(0, 31)
def test_entries_may_start_with_none() -> None:
    sinks = random_sinks()
    batch = Batch(4, (131,), (2,), sinks=sinks)
    batch.chosen[:, :20] = -1
    batch.layer.topk_indices_buffer.copy_(batch.chosen)
    output = batch.forward()
    assert output.isfinite().all(), f"{int(output.isnan().sum())} values are NaN"
    report = sink_report(batch, output, sinks)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE, report


def test_nothing_past_the_length_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(0, (40,), (2,), sinks=NO_SINKS)
    module = layout.prefill_module(batch.layer)
    combine = module.combine_topk_swa_indices

    def with_padding_that_misleads(*args: Any, **kwargs: Any) -> Any:
        indices, lens = combine(*args, **kwargs)
        columns = torch.arange(indices.shape[1], device=indices.device)
        return indices.masked_fill(columns >= lens[:, None], 0), lens

    monkeypatch.setattr(module, "combine_topk_swa_indices", with_padding_that_misleads)
    output = batch.forward()
    error = reference.relative(output, batch.expected(NO_SINKS))
    assert error < TOLERANCE, f"padding beyond the length counts: off by {error:.1%}"


@pytest.mark.parametrize("ratio", attention_batch.RATIOS)
def test_its_memory_is_reserved(ratio: int) -> None:
    _, output, trace = traced_run(ratio)
    assert output.isfinite().all(), f"{int(output.isnan().sum())} values are NaN"
    # A number or two for each request; indices alone are 1 KiB for each token.
    assert trace.largest <= 64, (
        f"allocates {trace.largest} B: {sorted(set(trace.made))}"
    )


def test_queries_reach_beyond_32_bits() -> None:
    batch = Batch(0, (9,), (3,), sinks=NO_SINKS)
    batch.queries = attention_batch.far_apart(batch.queries, 2**30)
    output = batch.forward()
    report = sink_report(batch, output, NO_SINKS)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(NO_SINKS)) < TOLERANCE, report


def test_gathered_rows_reach_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(4, (5, 6, 7, 9), (2, 2, 2, 3), sinks=NO_SINKS)
    batch.layer.max_model_len = 4 * 1_380_000
    tokens = batch.layer.max_num_batched_tokens
    rows = 4 * (1_380_000 + layout.WINDOW + tokens)
    size = (rows + 4 * tokens) * reference.HEAD_DIM  # the latter for indices
    with attention_batch.workspace_far_out(monkeypatch, size):
        output = batch.forward()
    report = sink_report(batch, output, NO_SINKS)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(NO_SINKS)) < TOLERANCE, report


@layout.unchanged_with_xpu_folder
def test_without_sinks_it_is_plain_attention() -> None:
    batch = Batch(128, (259,), (2,), sinks=NO_SINKS)
    output = batch.forward()
    assert reference.relative(output, batch.expected(NO_SINKS)) < TOLERANCE


@layout.unchanged_with_xpu_folder
def test_more_requests_than_are_gathered_at_once() -> None:
    batch = Batch(4, (5, 6, 7, 9, 30), (2, 2, 2, 3, 4), sinks=NO_SINKS)
    output = batch.forward()
    assert reference.relative(output, batch.expected(NO_SINKS)) < TOLERANCE


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_combine_into_new_tensors() -> None:
    """Each token reads its chosen entries, then the raw tokens of its window."""
    ops = layout.module(layout.OPS)
    arguments = {
        "topk_indices": torch.tensor([[0, 1, 2]] * 5),
        "query_start_loc": torch.tensor([0, 3, 5]),
        "seq_lens": torch.tensor([8, 12]),
        "gather_lens": torch.tensor([8, 12]),
    }
    moved = {name: rows.int().to(layout.device()) for name, rows in arguments.items()}
    indices, lens = ops.combine_topk_swa_indices(
        **moved, window_size=8, compress_ratio=4, topk=3, M=20, N=4
    )
    tokens = [(0, 5), (0, 6), (0, 7), (1, 10), (1, 11)]
    for token, (request, position) in enumerate(tokens):
        recent = range(max(position - 7, 0), position + 1)
        wanted = [*range((position + 1) // 4), *(4 + row for row in recent)]
        assert int(lens[token]) == len(wanted)
        read = indices[token, : len(wanted)].tolist()
        assert read == [20 * request + row for row in wanted]
