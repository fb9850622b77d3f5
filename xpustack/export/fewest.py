# SPDX-License-Identifier: Apache-2.0
"""The fewest of some steps that do, where each brings along those that it needs."""

from collections.abc import Callable, Iterable, Sequence

Slugs = tuple[str, ...]


def fewest(
    kept: Sequence[str],
    needs: Slugs,
    closure: Callable[[Iterable[str]], Slugs],
    works: Callable[[Slugs], bool],
) -> Slugs:
    """A part of `needs` with `kept` that works. Without any other step of it, and those
    that need that step, it did not.

    What a set cannot do without is not asked of again in a smaller one, nor is what it
    needs itself. The last steps are tried first, and many at once.

    Args:
        needs: steps that work, in their order, with all that each needs.
        closure: some steps with all that they need, in their order.
    """
    untried = [tuple(reversed(needs))]
    while untried:
        least = closure(kept)
        part = [slug for slug in untried.pop() if slug in needs and slug not in least]
        if not part:
            continue
        rest = [slug for slug in needs if not set(part) & set(closure([slug]))]
        if works(fewer := closure([*kept, *rest])):
            needs = fewer
        elif len(part) == 1:
            kept = [*kept, *part]
        else:
            half = len(part) // 2
            untried += [tuple(part[half:]), tuple(part[:half])]
    return needs
