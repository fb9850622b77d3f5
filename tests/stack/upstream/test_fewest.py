# SPDX-License-Identifier: Apache-2.0
"""The search for the fewest steps that do."""

import random
from collections.abc import Iterable

import pytest

from stack.upstream.search import fewest

STEPS = tuple(f"step-{number}" for number in range(60))


def closures(chance: random.Random) -> dict[str, set[str]]:
    """Each step with all that it needs: some need up to three earlier ones."""
    found: dict[str, set[str]] = {}
    for number, step in enumerate(STEPS):
        direct = chance.sample(STEPS[:number], min(number, chance.choice((0, 0, 1, 3))))
        found[step] = {step}.union(*(found[earlier] for earlier in direct))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_none_can_be_taken_from_it_and_few_sets_are_tried(seed: int) -> None:
    chance = random.Random(seed)
    whole = closures(chance)
    wanted = set(chance.sample(STEPS, chance.randrange(6)))
    tried = []

    def closure(some: Iterable[str]) -> tuple[str, ...]:
        present = set().union(*(whole[step] for step in some))
        return tuple(step for step in STEPS if step in present)

    def works(some: tuple[str, ...]) -> bool:
        assert closure(some) == some
        tried.append(some)
        return wanted <= set(some)

    kept = chance.sample(STEPS, 2)
    assert fewest(kept, STEPS, closure, works) == closure([*kept, *wanted])
    assert len(set(tried)) <= 12 * len(wanted) + 1
