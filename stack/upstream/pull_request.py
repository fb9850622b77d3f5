# SPDX-License-Identifier: Apache-2.0
"""A planned pull request, and what its description says of it.

It claims nothing that a check of this stack did not show.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stack.series.result import Figure, Result
from stack.series.tree import Step
from stack.upstream.form import FIRST_SUBJECT, upstream_test
from stack.upstream.notes import Notes
from stack.upstream.standing import Standing

TEXTS = "pull-requests"
"""The folder of the descriptions."""
_TITLE = re.compile(r"(?:\[[^\[\]]+\])+ \S")
_SENTENCE = re.compile(r"(?<=[a-z)'`%][.]) (?=[A-Z]|vLLM)")
_PLATFORM = re.compile(r"\[(CPU|CUDA|ROCm|XPU)\]")
_SUMMARY = re.compile(r"(\d+) tests, (\d+) fail before(?:, (\d+) on a CPU too)?")
_WORD = re.compile(
    r"\b(?!(?:each|from|have|into|only|other|over|than|that|their|them|they|what|where|with"
    r"|without|would)\b)\w{4,}"
)


@dataclass(frozen=True)
class Shown:
    """What a commit's tests show.

    Attributes:
        subject: the commit's, without tags.
        files: their files upstream.
        result: of the run before and after the step.
        own: whether they are the request's own, in files that upstream has: then
            those that it adds or changes.
    """

    subject: str
    files: tuple[str, ...]
    result: Result
    own: bool

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many tests there are, fail before, and need no XPU."""
        match = _SUMMARY.match(self.result.summary)
        assert match is not None, self.result.summary
        tests, red, on_cpu = map(int, match.groups(default="0"))
        return tests, red, on_cpu

    @property
    def where(self) -> str:
        """The platform of the run."""
        _, _, on_cpu = self.counts
        if self.own and on_cpu:
            return "vLLM's CPU platform"
        more = f"; {on_cpu} of them on vLLM's CPU platform as well" if on_cpu else ""
        return f"CPU, the XPU platform emulated{more}"


@dataclass(frozen=True)
class PullRequest:
    """One planned pull request.

    Attributes:
        commits: where its own steps stand, oldest first; the last names it.
        notes: what a person wrote for its reviewers.
        lines: the changed lines outside kernels and tests.
        kernels: the lines of kernels that it brings.
        lint: what the base's own hooks say of the branch.
        labels: those that the base's rules give it.
        alone: the result of the exported commit's own test run, None if that was not
            asked for.
        on_first: whether its branch stands on the first request's commit, which a base
            lacks until it is merged.
        proofs: of each commit with tests of the request's own, by step, their files and
            what they show.
    """

    commits: tuple[Standing, ...]
    notes: Notes
    branch: str
    lines: int
    kernels: int = 0
    lint: str = ""
    labels: tuple[str, ...] = ()
    alone: Result | None = None
    on_first: bool = False
    proofs: Mapping[str, tuple[tuple[str, ...], Result]] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        return self.standing.slug

    @property
    def standing(self) -> Standing:
        return self.commits[-1]

    @property
    def needs(self) -> tuple[str, ...]:
        """The steps that must be merged first."""
        own = [standing.slug for standing in self.commits]
        return tuple(slug for slug in self.standing.needs if slug not in own)

    @property
    def steps(self) -> list[Step]:
        return [standing.step.step for standing in self.commits]

    @property
    def title(self) -> str:
        return self.notes.title or self.steps[-1].subject

    @property
    def related(self) -> list[str]:
        """The requests and issues to look at first."""
        names = (name for step in self.steps for name in step.trailers.related)
        return list(dict.fromkeys(names))

    @property
    def upstream_status(self) -> str:
        return self.steps[-1].trailers.upstream_status

    @property
    def for_upstream(self) -> bool:
        return self.steps[-1].trailers.for_upstream

    @property
    def stands(self) -> str:
        """Such as `alone`, or `after` what comes first."""
        if self.standing.state != "stands":
            return f"{self.standing.state}: {self.standing.evidence}"
        return f"after {', '.join(self.needs)}" if self.needs else "alone"

    @property
    def stands_shortly(self) -> str:
        """The same with the number of steps that come first, not their names."""
        count = len(self.needs)
        if not count or self.standing.state != "stands":
            return self.stands
        return f"after {count} other step{'s' * (count > 1)}"

    @property
    def below(self) -> list[str]:
        """The subjects of the commits that its branch has below its own."""
        series = self.standing.series
        own = len(self.commits)
        steps = [tree.step.subject for tree in series.steps[:-own]] if series else []
        return [FIRST_SUBJECT, *steps] if self.on_first else steps

    @property
    def short(self) -> str:
        """A person's overview, or the first two sentences of the message."""
        if text := self.notes.sections.get("Overview"):
            return text
        first = self.steps[-1].message.partition("\n\n")[0]
        return " ".join(_SENTENCE.split(first.replace("\n", " "))[:2])

    @property
    def platform(self) -> str:
        """The platform that the title names; empty without one."""
        match = _PLATFORM.search(self.title)
        return match[1] if match else ""

    @property
    def searches(self) -> list[str]:
        """What to search for among the open requests: the related ones by number, the
        platform, and the title's words without its verb."""
        numbers = (name.rpartition("#")[2] for name in self.related)
        _, _, words = self.title.rpartition("]")[2].strip().partition(" ")
        about = [self.platform, *_WORD.findall(words)[:4]]
        return [*(f"{n} in:body" for n in numbers), " ".join(filter(None, about))]

    @property
    def shown(self) -> list[Shown]:
        """What the tests of each commit show. Where some commits have tests of the
        request's own, these are its tests."""
        found = []
        own = [commit for commit in self.commits if commit.slug in self.proofs]
        for commit in own or self.commits:
            step, test = commit.step.step, commit.test
            assert test is not None, "it stands"
            proof = self.proofs.get(commit.slug)
            files, result = proof or ((upstream_test(step),), test)
            subject = step.subject.rpartition("]")[2].strip()
            found.append(Shown(subject, files, result, proof is not None))
        return found

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """Of each test function that failed before, its first case."""
        cases: dict[str, list[Figure]] = {}
        for shown in self.shown:
            for figure in shown.result.figures:
                cases.setdefault(figure.test.partition("[")[0], []).append(figure)
        rows = []
        for first, *others in cases.values():
            more = f" and {len(others)} more case{'s' * (len(others) > 1)}"
            name = f"`{first.test}`{more if others else ''}"
            before = first.before.strip().removesuffix(":")
            rows.append((name, before, first.after or "passes"))
        return rows


def title_problem(title: str) -> str | None:
    """The reason why a title is not one for upstream; None if it is."""
    if _TITLE.match(title):
        return None
    return f"the subject {title!r} does not start with a tag such as [XPU]"


def requests_rows(requests: Sequence[PullRequest]) -> list[Mapping[str, object]]:
    """One row for each step: where it stands, and what its test shows there."""
    return [
        {
            "release": standing.step.step.release,
            "step": standing.slug,
            "request": request.slug,
            "stands": standing.text,
            "why": standing.evidence,
            "test": standing.test.summary if standing.test else "",
            "lines": request.lines,
            "related": " ".join(standing.step.step.trailers.related),
        }
        for request in requests
        for standing in request.commits
    ]
