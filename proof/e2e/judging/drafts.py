# SPDX-License-Identifier: Apache-2.0
"""How many drafts a run may accept, from its text and from what its draft knows."""

from collections.abc import Callable, Sequence

from proof.e2e.checkpoints import dspark
from proof.e2e.running.serving import Served

Says = Callable[[int], int | None]
"""What a draft says after a token; None if nobody knows."""


def successors(result: Served) -> dict[int, int]:
    """What follows a token in the texts of a run; its last place counts.

    Requests count in the order of their numbers: they end in another order from run to
    run, and one checkpoint serves several releases.
    """
    texts = sorted(result.texts.items(), key=lambda text: int(text[0].split("-")[0]))
    return dspark.following(text for _, text in texts)


def check_drafts(result: Served, says: Says, count: int) -> None:
    """Hold the engine's counters to the text, with `count` drafts a step."""
    found = result.answer["drafts"]["accepted"], result.answer["drafts"]["drafted"]
    possible = {(0, 0)}
    for prompt, new in zip(result.job.prompts, result.new_tokens(), strict=True):
        # The embedding of the first position is masked.
        alone = outcomes(new, 1, says, count, masked=prompt.length == 1)
        possible = {(a + c, b + d) for a, b in possible for c, d in alone}
    print(f"{found[0]} of {found[1]} drafts accepted, possible {sorted(possible)}")
    assert found in possible, f"{found[0]} of {found[1]}, possible {sorted(possible)}"
    assert all(accepted for accepted, _ in possible), "the draft knows nothing of it"


def outcomes(
    new: Sequence[int], done: int, says: Says, count: int, masked: bool = False
) -> set[tuple[int, int]]:
    """Accepted and drafted tokens of a request that has `done` of its `new` ones."""
    if done >= len(new):
        return {(0, 0)}
    found = set()
    for accepted in step(new, done, says, count, masked):
        for a, b in outcomes(new, done + 1 + accepted, says, count):
            found.add((accepted + a, count + b))
    return found


def step(
    new: Sequence[int], done: int, says: Says, count: int, masked: bool
) -> list[int]:
    """How many drafts of one step may be accepted. One beyond the text may be or not,
    and so may one of which nobody knows what it says."""
    possible = []
    token = None if masked else new[done - 1]
    for accepted in range(count):
        token = None if token is None else says(token)
        place = done + accepted
        actual = new[place] if place < len(new) else None
        if token is None or actual is None:
            possible.append(accepted)
            token = actual
        elif token != actual:
            return [*possible, accepted]
    return [*possible, count]
