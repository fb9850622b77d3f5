# SPDX-License-Identifier: Apache-2.0
"""`python3 -m lab.benchmarks.xpu_path.ranks.answers RESULTS`: tokens of jobs beside
another's.

Writes `answers.json` from the jobs' recordings, which are large, or reads it where it
is, and prints for each job how many tokens are those of the job that it is held to, and
how far the first other token of a request was behind.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "answers.json"
KEPT = ("read", "tokens", "logprobs", "drafts")
BESIDE = {
    "two-mixed-rows": "one-mixed",
    "two-eager": "one-mixed",
    "two-graphs": "two-eager",
    "two-experts-cached": "two-experts",
    "two-experts-cached-graphs": "two-experts-graphs",
    "two-v41-drafts-eager": "two-v41-eager",
    "two-v41-drafts-graphs": "two-v41-graphs",
}
"""Jobs that are held to another one than the first below that a name begins with."""
ONES = ("v41-drafts", "v41", "vision", "experts-cached", "experts", "mixed")


@dataclass(frozen=True)
class Compared:
    """A job's tokens beside another's."""

    job: str
    other: str
    tokens: int
    same: int
    """Tokens before the first other one of each request."""
    behind: tuple[float | None, ...]
    """How far each first other token was behind the best for the other job, if that is
    on record."""

    @property
    def leads(self) -> str:
        """How far each first other token was behind, in words."""
        return ", ".join("?" if b is None else f"{b:.3f}" for b in self.behind)

    def __str__(self) -> str:
        found = f"{self.job} beside {self.other}: {self.same} of {self.tokens} tokens"
        return f"{found}; first others behind by {self.leads}" if self.behind else found


def other_of(job: str) -> str | None:
    """The job that `job` is held to."""
    if not job.startswith("two-"):
        return None
    if job in BESIDE:
        return BESIDE[job]
    name = next((one for one in ONES if job.startswith(f"two-{one}")), None)
    return name and f"one-{name}"


def behind_of(place: dict[str, Any], ours: int) -> float | None:
    """By how much log-probability a token was behind the best of its place."""
    if str(ours) not in place:
        return None
    best: float = max(logprob for logprob, _ in place.values())
    return best - float(place[str(ours)][0])


def compared(job: str, ours: Any, other: str, theirs: Any) -> Compared:
    """The requests that both were asked, wave by wave."""
    tokens, same = 0, 0
    behind: list[float | None] = []
    for wave, (mine, others) in enumerate(
        zip(ours["tokens"], theirs["tokens"], strict=False)
    ):
        if ours["read"][wave] != theirs["read"][wave]:
            continue
        for number, (a, b) in enumerate(zip(mine, others, strict=True)):
            pairs = enumerate(zip(a, b, strict=True))
            place = next((i for i, (x, y) in pairs if x != y), None)
            tokens += len(a)
            same += len(a) if place is None else place
            if place is not None:
                known = theirs["logprobs"][wave][number]
                behind.append(behind_of(known[place], a[place]) if known else None)
    return Compared(job, other, tokens, same, tuple(behind))


def read(folder: Path) -> dict[str, Any]:
    """What each job answered."""
    file = folder / FILE
    if not file.exists():
        import torch

        found = {}
        for path in sorted(folder.glob("*.pt")):
            answer = torch.load(path, weights_only=False)
            found[path.stem] = {name: answer[name] for name in KEPT}
            found[path.stem]["exchanged"] = [len(r["shared"]) for r in answer["ranks"]]
        file.write_text(json.dumps(found))
    answers: dict[str, Any] = json.loads(file.read_text())
    return answers


def comparisons(answers: dict[str, Any]) -> Iterator[Compared]:
    """Of all jobs that are there."""
    for job, ours in answers.items():
        other = other_of(job)
        if other in answers:
            yield compared(job, ours, other, answers[other])


def main() -> None:
    """Write, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    answers = read(parser.parse_args().results)
    for found in comparisons(answers):
        own = answers[found.job]
        print(found, own["drafts"] or "", f"exchanges {own['exchanged']}")


if __name__ == "__main__":
    main()
