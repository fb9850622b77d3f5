# SPDX-License-Identifier: Apache-2.0
"""What one engine fetched from another: every byte, and the answer that follows.

A GPU's machine has what this imports.
"""

from typing import Any

from proof.e2e.running.asked import NEW, Asked


def check_pages(found: dict[str, Any], asked: Asked) -> None:
    """All that the prompt's last token sees has arrived, and nothing else."""
    pages = found["pages"]
    print(f"{asked}: {pages}")
    assert pages["stray"] == 0, "other blocks were written"
    assert pages["unlike"] == 0, "the sender's ranks have different bytes"
    for group, entry in pages["groups"].items():
        assert entry["missing"] == 0, f"{group}: blocks are missing: {entry}"
        assert entry["wrong"] == 0, f"{group}: bytes are wrong: {entry}"
        assert entry["compared"], f"{group}: nothing came: {entry}"
    known = sum(entry["known"] for entry in pages["groups"].values())
    assert bool(known) == bool(asked.receiver_knows), known
    assert bool(found["preemptions"]) == asked.preempted, found["preemptions"]


def check_answer(found: dict[str, Any], bound: float) -> None:
    """Its tokens are the sender's own, and log-probabilities at most `bound` apart."""
    ours, alone = found["answer"], found["alone"]
    assert ours["tokens"] == alone["tokens"]
    assert len(ours["tokens"]) == len(ours["logprobs"]) >= NEW
    apart = max(
        abs(a - b)
        for place, other in zip(ours["logprobs"], alone["logprobs"], strict=True)
        for a, b in zip(place, other, strict=True)
    )
    print(f"log-probabilities are {apart:.5f} apart")
    assert apart <= bound
