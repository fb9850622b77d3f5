# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill weigh the attention sink in, by the kernels that upstream has."""

import pytest
import torch
from helpers import attention_batch, layout
from helpers import reference_attention as reference
from helpers.attention_batch import NO_SINKS, Batch, random_sinks, sink_report

TOLERANCE = 4e-3


def check(batch: Batch, sinks: torch.Tensor) -> None:
    output = batch.forward()
    report = sink_report(batch, output, sinks)
    print(f"figure: {report}")
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE, report


@pytest.mark.parametrize("ratio", attention_batch.RATIOS)
def test_decode_weighs_the_sink(ratio: int) -> None:
    sinks = random_sinks()
    check(Batch(ratio, (600, 131), (1, 1), sinks=sinks), sinks)


@pytest.mark.parametrize("ratio", attention_batch.RATIOS)
def test_prefill_weighs_the_sink(ratio: int) -> None:
    sinks = random_sinks()
    check(Batch(ratio, (260, 9), (2, 2), sinks=sinks), sinks)


def test_prefill_and_decode_in_one_batch() -> None:
    sinks = random_sinks()
    check(Batch(128, (131, 259), (1, 2), sinks=sinks), sinks)


def test_draft_tokens_see_their_own_prefix() -> None:
    sinks = random_sinks()
    batch = Batch(4, (129, 7), (2, 2), sinks=sinks, speculative_tokens=1)
    check(batch, sinks)


@pytest.mark.parametrize("lens", [(1, 1), (3, 3)], ids=["decode", "prefill"])
def test_a_sink_of_any_size(lens: tuple[int, int]) -> None:
    """A head may have no sink, one that takes all weight, or one beyond exp's range."""
    sinks = random_sinks()
    sinks[:4] = torch.tensor([-torch.inf, torch.inf, 300.0, -300.0])
    check(Batch(0, (131, 5), lens, sinks=sinks), sinks)


@pytest.mark.parametrize("lens", [(1,), (3,)], ids=["decode", "prefill"])
@layout.unchanged_with_xpu_folder
def test_without_sinks_it_is_plain_attention(lens: tuple[int]) -> None:
    batch = Batch(128, (259,), lens, sinks=NO_SINKS)
    expected = batch.expected(NO_SINKS)
    assert reference.relative(batch.forward(), expected) < TOLERANCE
