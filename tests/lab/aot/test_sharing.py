# SPDX-License-Identifier: Apache-2.0
"""What ranks could share: what it saves, what its collectives cost, and who wins."""

from dataclasses import replace

import pytest

from lab.aot.costs import sharing, step
from lab.aot.costs.model import devices, ends
from lab.aot.costs.sharing import Shared
from lab.aot.costs.step import Kernels, Range, Split
from lab.memory import FLASH

KNOWN = {device.name: device for device in devices()}
B60 = Split(KNOWN["Arc Pro B60"], 8, 2)
BUSY = Kernels(
    {"window": Range(1, 2), "ratio4": Range(3, 4), "ratio128": Range(5, 6)},
    {"ratio4": Range(700, 800)},
)


def form(forms: list[Shared], name: str) -> Shared:
    return next(one for one in forms if one.name == name)


def test_a_form_wins_where_its_least_saving_exceeds_its_highest_cost() -> None:
    saved = Range(5, 9)
    for cost, verdict in (
        (Range(1, 4), "wins"),
        (Range(1, 6), "either"),
        (Range(9, 12), "loses"),
    ):
        # The fast end of a saving is the smaller one: less time is saved.
        assert Shared("any", saved, cost).verdict == verdict
    assert Shared("any", saved, Range(1, 6)).net == Range(8, -1)


def test_a_rank_reads_an_eighth_of_shared_weights() -> None:
    """Of the compressors' 0.52 GB seven eighths are saved."""
    shared = form(sharing.decode(FLASH, B60, 1, 16_384, BUSY), "compressors by columns")
    fast = ends(B60.device)[0].gigabytes_per_second
    assert shared.saved.fast * fast / 1e3 == pytest.approx(0.52 * 7 / 8, rel=0.02)
    # One gather in each of 41 layers, at least what the smallest sum takes.
    assert shared.cost.fast >= 41 * 17e-3


def test_decode_shares_no_part_of_a_row() -> None:
    few, many = (
        form(sharing.decode(FLASH, B60, n, 16_384, BUSY), "indexer scores by rows")
        for n in (1, 32)
    )
    assert few.saved == Range(0, 0)
    assert many.saved.slow == pytest.approx(21 * 0.8 * 7 / 8)


def test_rows_of_a_chunk_are_shared_with_their_queries() -> None:
    alone = step.prefill(FLASH, B60, 2048, 16_384, BUSY)
    parts = sharing.with_rows_shared(alone, FLASH, B60, 2048)
    forms = sharing.prefill(FLASH, B60, 2048, BUSY)
    rows = form(forms, "indexer scores by rows")
    queries = form(forms, "the queries of these rows, beside their scores")
    before, after = step.total(alone), step.total(parts)
    for end in ("fast", "slow"):
        saved = getattr(rows.saved, end) + getattr(queries.saved, end)
        spent = getattr(rows.cost, end)
        assert getattr(after, end) == pytest.approx(
            getattr(before, end) - saved + spent
        )


def test_one_rank_has_nothing_to_share() -> None:
    alone = replace(B60, ranks=1, stages=1)
    for one in sharing.prefill(FLASH, alone, 2048, BUSY):
        assert one.saved == Range(0, 0)
    parts = step.prefill(FLASH, alone, 2048, 16_384, BUSY)
    assert sharing.with_rows_shared(parts, FLASH, alone, 2048) == parts


def test_a_short_chunk_is_not_shared() -> None:
    """It spends nothing on an exchange."""
    for tokens, shared in ((1023, False), (1024, True)):
        parts = step.prefill(FLASH, B60, tokens, 16_384, BUSY)
        found = sharing.with_rows_shared(parts, FLASH, B60, tokens)
        assert (found != parts) == shared, tokens


def test_a_gather_moves_half_of_what_a_sum_does() -> None:
    known = step.constants()
    size, table = 2**24, 2**16
    gathered, summed = (
        of(size, 8, B60, known) for of in (step.all_gather, step.all_reduce)
    )
    start = step.all_gather(table, 8, B60, known)
    assert start == step.all_reduce(table, 8, B60, known)
    assert summed.slow - start.slow == pytest.approx(2 * (gathered.slow - start.slow))
