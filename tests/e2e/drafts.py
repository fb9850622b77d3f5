# SPDX-License-Identifier: Apache-2.0
"""How many drafts a run must accept, from its text and from what its draft knows."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from serving import Served


class Accepted(NamedTuple):
    """The fewest and the most drafts that can be accepted, of how many."""

    least: int
    most: int
    drafted: int


def successors(result: Served) -> dict[int, int]:
    """What follows a token in the texts of a run; the last place counts."""
    texts = result.texts.values()
    return {before: after for text in texts for before, after in pairwise(text)}


def expected(
    result: Served, known: Mapping[int, int], count: int, fallback: bool = True
) -> Accepted:
    """Follow each request: `count` drafts a step, each the successor of the one before.

    A draft beyond the end of the text may be right or not. So may one after a token
    that is not `known`, unless the draft then repeats it (`fallback`), and the draft
    after a prompt of one token, whose embedding is masked.
    """
    least = most = drafted = 0
    for prompt, new in zip(result.job.prompts, result.new_tokens(), strict=True):
        done = 1
        while done < len(new):
            token: int | None = new[done - 1]
            if done == 1 and prompt.length == 1:
                token = None
            sure, possible, failed = 0, 0, False
            for place in range(done, done + count):
                if token is not None:
                    token = known.get(token, token if fallback else None)
                actual = new[place] if place < len(new) else None
                unsure = token is None or actual is None
                failed |= not unsure and token != actual
                if failed:
                    break
                possible += 1
                sure += not unsure and sure == possible - 1
            assert sure == possible or done + possible >= len(new) or token is None
            least, most, drafted = least + sure, most + possible, drafted + count
            done += 1 + sure
    return Accepted(least, most, drafted)


def check_drafts(
    result: Served, known: Mapping[int, int], count: int, fallback: bool = True
) -> None:
    """Hold the engine's counters to what the text says."""
    wanted = expected(result, known, count, fallback)
    found = result.answer["drafts"]
    print(f"drafts: {found}, expected {wanted}")
    assert found["drafted"] == wanted.drafted, (found, wanted)
    assert wanted.least <= found["accepted"] <= wanted.most, (found, wanted)
    assert wanted.least, "the draft knows nothing of this text"
