# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: every byte that NIXL brings is the sender's, and answers
are those of one engine."""

import importlib.util
from collections.abc import Iterable
from dataclasses import replace

import pytest

from proof.e2e.judging.checks import SAME
from proof.e2e.judging.transfers import check_answer, check_pages
from proof.e2e.running.asked import Asked
from proof.e2e.running.pairs import Pair
from proof.e2e.running.serving import Engines

pytestmark = [
    pytest.mark.newest,
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="there is no nixl: run this by `tox -e hosts`",
    ),
]

PAGE = 256
EDGES = (20, 63, 64, 65, 127, 128, 191, 192, 255, 256, 319, 600)
"""Lengths beside the ends of blocks and windows."""
SAMPLED = (268, 300, 173, 372, 263, 36, 248), (99, 116, 159, 16, 195, 219, 177)
"""Of those between, drawn once from 1 to 383."""
ANSWERED = (20, 191, 255)
CHUNKS = (700, 100, 33)
PADDED = 0.2
"""How far log-probabilities may lie apart where a step rounds in another way: padded to
the number of drafts, or over other ranks. Bytes are equal nevertheless."""
MTP = (("method", "mtp"), ("num_speculative_tokens", 1))
DSPARK = (("method", "dspark"), ("num_speculative_tokens", 3))


def prompts(lengths: Iterable[int], first: int) -> tuple[Asked, ...]:
    """Prompts of these lengths, in chunks of one size after the other."""
    return tuple(
        Asked(length, CHUNKS[(first + n) % len(CHUNKS)], length in ANSWERED)
        for n, length in enumerate(lengths)
    )


HITS = (
    Asked(319, 128, answered=True, receiver_knows=PAGE),
    Asked(300, 128, answered=True, sender_knows=PAGE),
    Asked(447, 128, sender_knows=PAGE, receiver_knows=PAGE),
)
"""Beginnings that one of the engines has in its prefix cache, or both."""
FEW = (Asked(20, answered=True), Asked(64, 25), Asked(191, 100, answered=True))
PADDED_BY_BOTH = Asked(PAGE + 1, sender_knows=PAGE, answered=True)
LEAST = (Asked(20, answered=True), PADDED_BY_BOTH)
WITH_DRAFTS = (*FEW, Asked(255), Asked(319), PADDED_BY_BOTH)
AMONG_RANKS = (
    Asked(1, answered=True),
    Asked(64, 25),
    Asked(191, 100, answered=True),
    Asked(255, 33),
    Asked(319, 128, receiver_knows=PAGE),
)
PREEMPTED = (
    Asked(60, answered=True, preempted=True),
    Asked(124, 100, answered=True, preempted=True),
    Asked(20, answered=True),
)
"""Whose answers need more blocks than leave their windows, and the next one's."""
WITH_A_PAGE = (
    Asked(20, answered=True),
    Asked(PAGE - 4, 128, answered=True, preempted=True),
)
"""One that is preempted when its first page is full."""
RANKS = ((2, 2), (1, 2), (2, 1))
"""Those of the engine that reads, and of the other."""
PAIRS = (
    Pair("device buffers", "xpu", prompts(EDGES, 0)),
    Pair("host buffers", "cpu", prompts(EDGES, 1)),
    Pair("sampled lengths, device buffers", "xpu", prompts(SAMPLED[0], 0)),
    Pair("sampled lengths, host buffers", "cpu", prompts(SAMPLED[1], 1)),
    Pair("pre-emption, device buffers", "xpu", WITH_A_PAGE),
    Pair("pre-emption, host buffers", "cpu", PREEMPTED),
    Pair("prefixes, device buffers", "xpu", HITS),
    Pair("prefixes, host buffers", "cpu", HITS),
    Pair("MTP, device buffers", "xpu", WITH_DRAFTS, MTP),
    Pair("MTP, host buffers", "cpu", WITH_DRAFTS, MTP),
    Pair("DSpark, device buffers", "xpu", WITH_DRAFTS, DSPARK),
    Pair("DSpark, host buffers", "cpu", WITH_DRAFTS, DSPARK),
    *(
        Pair(name, where, asked, ranks=ranks)
        for ranks in RANKS
        for name, where, asked in (
            (f"TP {ranks}, device buffers", "xpu", (*AMONG_RANKS, Asked(600))),
            (f"TP {ranks}, host buffers", "cpu", AMONG_RANKS),
        )
    ),
    Pair("MTP, TP (2, 2), host buffers", "cpu", FEW, MTP, (2, 2)),
    Pair("MTP, TP (1, 2), device buffers", "xpu", FEW, MTP, (1, 2)),
    Pair("MTP, TP (2, 1), host buffers", "cpu", FEW, MTP, (2, 1)),
    Pair("DSpark, TP (2, 2), device buffers", "xpu", LEAST, DSPARK, (2, 2)),
    Pair("DSpark, TP (1, 2), host buffers", "cpu", LEAST, DSPARK, (1, 2)),
    Pair("TP (1, 8), device buffers", "xpu", LEAST[:1], ranks=(1, 8)),
    Pair("TP (4, 8), device buffers", "xpu", LEAST[:1], ranks=(4, 8)),
    Pair("TP (8, 4), host buffers", "cpu", LEAST[:1], ranks=(8, 4)),
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_every_byte_arrives(engines: Engines, release: str, pair: Pair) -> None:
    served = pair.serve(engines, release)
    assert len(served) == len(pair.asked)
    for found, asked in zip(served, pair.asked, strict=True):
        check_pages(found, asked)
        if asked.answered:
            check_answer(found, SAME if pair.rounds_alike(asked) else PADDED)


@pytest.mark.parametrize(
    ("buffers", "ranks"), [("xpu", (1, 1)), ("cpu", (1, 1)), ("cpu", (1, 2))]
)
def test_a_byte_that_changes_is_seen(
    engines: Engines, release: str, buffers: str, ranks: tuple[int, int]
) -> None:
    asked = Asked(70, overwritten=True)
    name = f"a changed byte in {buffers}, TP {ranks}"
    pair = Pair(name, buffers, (asked, Asked(20)), ranks=ranks)
    changed, next_one = pair.serve(engines, release)
    wrong = {
        group: entry["wrong"] for group, entry in changed["pages"]["groups"].items()
    }
    assert sorted(wrong.values())[-2:] == [0, ranks[1]], wrong
    check_pages(next_one, replace(asked, length=20, overwritten=False))
