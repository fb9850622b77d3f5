# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: every byte that NIXL brings is the sender's, and answers
are those of one engine."""

import importlib.util
import random
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
ANSWERED = (20, 191, 255)
SOME = tuple(random.Random(61).sample(range(1, 400), 3))
CHUNKS = (700, 100, 33)
PADDED = 0.2
"""How far log-probabilities may lie apart with drafts: a receiver's first step is
padded to their number, and rounds another way. Bytes are equal nevertheless."""
MTP = ("speculative_config", {"method": "mtp", "num_speculative_tokens": 1})


def edges(first: int) -> tuple[Asked, ...]:
    """Prompts of all lengths, in chunks of one size after the other."""
    return tuple(
        Asked(length, CHUNKS[(first + n) % len(CHUNKS)], length in ANSWERED)
        for n, length in enumerate((*EDGES, *SOME))
    )


HITS = (
    Asked(319, 128, answered=True, receiver_knows=PAGE),
    Asked(300, 128, answered=True, sender_knows=PAGE),
    Asked(447, 128, sender_knows=PAGE, receiver_knows=PAGE),
)
"""Beginnings that one of the engines has in its prefix cache, or both."""
FEW = (Asked(20, answered=True), Asked(64, 25), Asked(191, 100, answered=True))
PAIRS = (
    Pair("device buffers", "xpu", edges(0)),
    Pair("host buffers", "cpu", edges(1)),
    Pair("prefixes, device buffers", "xpu", HITS),
    Pair("prefixes, host buffers", "cpu", HITS),
    Pair("MTP, device buffers", "xpu", (*FEW, Asked(255), Asked(319)), (MTP,)),
    Pair("MTP, host buffers", "cpu", (*FEW, Asked(255), Asked(319)), (MTP,)),
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_every_byte_arrives(engines: Engines, release: str, pair: Pair) -> None:
    served = pair.serve(engines, release)
    assert len(served) == len(pair.asked)
    for found, asked in zip(served, pair.asked, strict=True):
        check_pages(found, asked)
        if asked.answered:
            check_answer(found, PADDED if pair.engine else SAME)


@pytest.mark.parametrize("buffers", ["xpu", "cpu"])
def test_a_byte_that_changes_is_seen(
    engines: Engines, release: str, buffers: str
) -> None:
    asked = Asked(70, overwritten=True)
    pair = Pair(f"a changed byte in {buffers}", buffers, (asked, Asked(20)))
    changed, next_one = pair.serve(engines, release)
    wrong = {
        group: entry["wrong"] for group, entry in changed["pages"]["groups"].items()
    }
    assert sorted(wrong.values())[-2:] == [0, 1], wrong
    check_pages(next_one, replace(asked, length=20, overwritten=False))
