# SPDX-License-Identifier: Apache-2.0
"""Decode attends to the pages with the sink, in memory reserved beforehand."""

import pytest
from helpers import attention_batch, kernel_trace, layout
from helpers import reference_attention as reference
from helpers.attention_batch import Batch, random_sinks, sink_report
from helpers.common_ops import TestDraft, TestMixedIndices, TestSharedOps  # noqa: F401

TOLERANCE = 4e-3


@layout.unchanged_with_xpu_folder
@pytest.mark.parametrize("ratio", attention_batch.RATIOS)
def test_sinks_weigh_in(ratio: int) -> None:
    sinks = random_sinks()
    batch = Batch(ratio, (600, 131), (1, 1), sinks=sinks)
    output = batch.forward()
    report = sink_report(batch, output, sinks)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE, report


@layout.unchanged_since(0, 31)
def test_few_keys_or_none() -> None:
    sinks = random_sinks()
    batch = Batch(128, (1, 129, 9), (1, 1, 1), sinks=sinks, padded=1)
    output = batch.forward()
    assert output.isfinite().all(), f"{int(output.isnan().sum())} values are NaN"
    assert not output[-1].any(), "padding gives values"
    report = sink_report(batch, output, sinks)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE, report


@layout.unchanged_with_xpu_folder
def test_draft_tokens_see_their_own_prefix() -> None:
    sinks = random_sinks()
    batch = Batch(0, (129, 7), (2, 2), sinks=sinks, speculative_tokens=1)
    output = batch.forward()
    report = sink_report(batch, output, sinks)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE, report


def test_it_asks_for_no_memory_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batch(0, (131, 5), (1, 1), sinks=random_sinks())
    with batch.ready() as run, kernel_trace.traced(monkeypatch) as trace:
        run()
    assert not trace.waits, f"waits for the device: {sorted(set(trace.waits))}"
    assert not trace.made, f"allocates: {sorted(set(trace.made))}"
    assert len(trace.launches) <= 2, f"launches {trace.launches}"


def test_queries_reach_beyond_32_bits() -> None:
    batch = Batch(0, (7, 8, 9), (1, 1, 1), sinks=attention_batch.NO_SINKS)
    batch.queries = attention_batch.far_apart(batch.queries, 2**30)
    output = batch.forward()
    report = sink_report(batch, output, attention_batch.NO_SINKS)
    print(f"figure: {report}")
    expected = batch.expected(attention_batch.NO_SINKS)
    assert reference.relative(output, expected) < TOLERANCE, report


@layout.unchanged_with_xpu_folder
def test_without_sinks_it_is_plain_attention() -> None:
    batch = Batch(128, (600,), (1,), sinks=attention_batch.NO_SINKS)
    output = batch.forward()
    expected = batch.expected(attention_batch.NO_SINKS)
    assert reference.relative(output, expected) < TOLERANCE
