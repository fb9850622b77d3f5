# SPDX-License-Identifier: Apache-2.0
"""The description of each pull request.

A description has the sections that the base's own template asks for, and its
checklist. It claims nothing that a check of this stack did not show.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xpustack.core.markdown import table
from xpustack.export.notes import Notes
from xpustack.export.standing import Standing
from xpustack.export.upstream_form import upstream_test
from xpustack.series.result import Figure, Result
from xpustack.series.tree import Step

TEXTS = "pull-requests"
"""The folder of the descriptions."""
TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
_DEFAULT = ("Purpose", "Test Plan", "Test Result")
_TITLE = re.compile(r"(?:\[[^\[\]]+\])+ \S")
_SENTENCE = re.compile(r"(?<=[a-z)'`%][.]) (?=[A-Z]|vLLM)")
_SUMMARY = re.compile(r"(\d+) tests, (\d+) fail before(?:, (\d+) on a CPU too)?")
_AI_BOX = re.compile(r"- \[ \] (?=AI assistance was used)")
_PLATFORM = re.compile(r"\[(CPU|CUDA|ROCm|XPU)\]")
_WORD = re.compile(
    r"\b(?!(?:each|from|have|into|only|other|over|than|that|their|them|they|what|where|with"
    r"|without|would)\b)\w{4,}"
)
_COLLAPSE = 4
"""From so many earlier commits on, a text folds their list."""


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
        also: the subjects of steps that must be merged first although its tests pass
            without them.
        alone: the result of the exported commit's own test run, None if that was not
            asked for.
    """

    commits: tuple[Standing, ...]
    notes: Notes
    branch: str
    lines: int
    kernels: int = 0
    lint: str = ""
    labels: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    alone: Result | None = None

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
    def for_upstream(self) -> bool:
        status = self.steps[-1].trailers.upstream_status
        return not status.startswith(("Inappropriate", "Backport"))

    @property
    def stands(self) -> str:
        """Such as `alone`, or `after` what comes first."""
        if self.standing.state != "stands":
            return f"{self.standing.state}: {self.standing.evidence}"
        names = ", ".join(f"`{slug}`" for slug in self.needs)
        return f"after {names}" if names else "alone"

    @property
    def below(self) -> list[str]:
        """The subjects of the commits that its branch has below its own."""
        series = self.standing.series
        own = len(self.commits)
        return [tree.step.subject for tree in series.steps[:-own]] if series else []

    @property
    def tests(self) -> list[str]:
        """The tests' paths upstream."""
        return [upstream_test(step) for step in self.steps]


@dataclass(frozen=True)
class Template:
    """What the base asks of a description: its headings and its checklist."""

    headings: tuple[str, ...] = _DEFAULT
    checklist: str = field(default="")

    @classmethod
    def read(cls, text: str) -> "Template":
        """From the base's own template. With unknown headings, use the three default
        ones."""
        headings = tuple(re.findall(r"(?m)^## (.+?)\s*$", text))
        if not headings or not set(headings) <= set(_SECTIONS):
            headings = _DEFAULT
        box = re.search(r"(?s)<details>.*?</details>", text)
        return cls(headings, _AI_BOX.sub("- [x] ", box[0]) if box else "")


def title_problem(title: str) -> str | None:
    """The reason why a title is not one for upstream; None if it is."""
    if _TITLE.match(title):
        return None
    return f"the subject {title!r} does not start with a tag such as [XPU]"


def describe(request: PullRequest, template: Template, base: str) -> str:
    """The Markdown text of one pull request; its first line is the title."""
    lines = [f"# {request.title}", ""]
    for heading in template.headings:
        lines += [f"## {heading}", "", *_SECTIONS[heading](request, base), ""]
    lines += ["## AI assistance", "", *_DISCLOSURE, ""]
    lines += ["## Not a duplicate", "", *_duplicate(request, base), ""]
    if template.checklist:
        lines += ["---", "", template.checklist, ""]
    return "\n".join(lines)


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


def _summary(request: PullRequest, base: str) -> list[str]:
    return [_short(request), *_context(request)]


def _short(request: PullRequest) -> str:
    """A person's overview, or the first two sentences of the message."""
    if text := request.notes.sections.get("Overview"):
        return text
    first = request.steps[-1].message.partition("\n\n")[0]
    return " ".join(_SENTENCE.split(first.replace("\n", " "))[:2])


def _context(request: PullRequest) -> list[str]:
    """What a reviewer looks at first, and what must be merged first."""
    lines = []
    if request.related:
        lines += ["", f"Related: {', '.join(request.related)}."]
    if subjects := request.below:
        count = f"{len(subjects)} earlier change{'s' * (len(subjects) > 1)}"
        own = len(request.steps)
        last = "the last commit is" if own == 1 else f"the last {own} commits are"
        said = f"Needs {count} first; of this branch only {last} this request."
        listed = [f"- {subject}" for subject in subjects]
        if len(subjects) >= _COLLAPSE:
            heading = "<summary>The earlier changes</summary>"
            listed = ["<details>", heading, "", *listed, "", "</details>"]
        lines += ["", said, "", *listed]
    if request.also:
        lines += ["", "Serving needs these as well, though the tests do not:", ""]
        lines += [f"- {subject}" for subject in request.also]
    return lines


def _purpose(request: PullRequest, base: str) -> list[str]:
    overview = request.notes.sections.get("Overview")
    opening = [overview, ""] if overview else []
    messages = _messages(request)
    return [*opening, *messages, *_context(request), "", *_reasons(request)]


def _claims(request: PullRequest, base: str) -> list[str]:
    lines = []
    for standing, path in zip(request.commits, request.tests, strict=True):
        tests, red, _ = _counts(standing)
        lines += [
            f"- {standing.step.step.subject.rpartition(']')[2].strip()}.",
            f"- Tests in `{path}`: {red} of {tests} red without it, all green with it.",
        ]
    if _PLATFORM.search(request.title):
        lines.append("- Other platforms stay as they are, as far as its tests show.")
    return lines


def _details(request: PullRequest, base: str) -> list[str]:
    messages = _messages(request)
    if " ".join(messages).replace("\n", " ") == _short(request):
        return _reasons(request)
    return [*messages, "", *_reasons(request)]


def _messages(request: PullRequest) -> list[str]:
    """The messages of the request's commits; of several, each under its subject."""
    if len(request.steps) == 1:
        return [request.steps[0].message]
    lines: list[str] = []
    for number, step in enumerate(request.steps, start=1):
        lines += ["", f"### Commit {number}: {step.subject}", "", step.message]
    return lines[1:]


def _reasons(request: PullRequest) -> list[str]:
    """A person's words, and the size."""
    lines: list[str] = []
    for heading, text in request.notes.sections.items():
        if heading not in ("Overview", "Ran elsewhere"):
            lines += [f"### {heading}", "", text, ""]
    size = f"{request.lines} changed lines outside kernels and tests"
    size += f", {request.kernels:,} in new kernels." if request.kernels else "."
    if request.labels:
        size += f" Labels by the repository's rules: {', '.join(request.labels)}."
    return [*lines, size]


def _plan(request: PullRequest, base: str) -> list[str]:
    paths = " ".join(request.tests)
    pytest = ".venv/bin/python -m pytest"
    counts = [_counts(standing) for standing in request.commits]
    anywhere = all(tests == on_cpu for tests, _, on_cpu in counts)
    where = "On any machine" if anywhere else "On an XPU"
    lines = [f"{where}:", "", "```sh", f"{pytest} {paths}", "```"]
    if not anywhere and any(on_cpu for _, _, on_cpu in counts):
        lines += ["", "The tests marked `any_platform` run on any machine:", ""]
        lines += ["```sh", f"{pytest} -m any_platform {paths}", "```"]
    before = f"HEAD~{len(request.steps)}"
    lines += ["", "To see them fail, without the change:", "", "```sh"]
    lines += [f"git restore --source {before} -- vllm"]
    lines += [f"{pytest} {paths}; git restore -- vllm", "```"]
    release = base.partition("+")[0]
    lines += ["", _WITHOUT, "", "```sh"]
    lines += [
        f"tox -e apply-and-test -- {release} {step.slug}" for step in request.steps
    ]
    return [*lines, "```"]


def _result(request: PullRequest, base: str) -> list[str]:
    rows = []
    for standing, path in zip(request.commits, request.tests, strict=True):
        where = "CPU, the XPU platform emulated"
        tests, red, on_cpu = _counts(standing)
        if on_cpu:
            where += f"; {on_cpu} of them on vLLM's CPU platform as well"
        said = f"{tests} passed, {red} of them failed before"
        rows.append((f"`{path}`", where, said))
    rows.append(("the repository's own hooks on the touched files", "-", request.lint))
    if request.alone is not None:
        what = "the branch, its test run from `tests/`"
        rows.append((what, "as above", request.alone.summary))
    rows.append(("any of it", "an Intel GPU", "**not run**"))
    if "Ran elsewhere" not in request.notes.sections:
        rows.append(("any of it", "CUDA, ROCm", "not run"))
    rows.append(("an accuracy evaluation of a full model", "-", "**not run**"))
    lines = [f"On {base}. {_EMULATED}", ""]
    lines.append(table(("what", "where", "result"), rows))
    if text := request.notes.sections.get("Ran elsewhere"):
        lines += ["", text]
    if figures := _figures(request):
        lines += ["", "Red before, green after:", ""]
        lines.append(table(("test", "before", "after"), figures))
    return lines


def _figures(request: PullRequest) -> list[tuple[str, str, str]]:
    """Of each test function that failed before, its first case."""
    cases: dict[str, list[Figure]] = {}
    for standing in request.commits:
        for figure in standing.test.figures if standing.test else ():
            cases.setdefault(figure.test.partition("[")[0], []).append(figure)
    rows = []
    for first, *others in cases.values():
        more = f" and {len(others)} more case{'s' * (len(others) > 1)}"
        name = f"`{first.test}`{more if others else ''}"
        before = first.before.strip().removesuffix(":")
        rows.append((name, before, first.after or "passes"))
    return rows


def _validation(request: PullRequest, base: str) -> list[str]:
    return [*_plan(request, base), "", *_result(request, base)]


def _counts(standing: Standing) -> tuple[int, int, int]:
    """How many tests there are, fail before, and need no XPU."""
    assert standing.test is not None, "it stands"
    match = _SUMMARY.match(standing.test.summary)
    assert match is not None, standing.test.summary
    tests, red, on_cpu = match.groups(default="0")
    return int(tests), int(red), int(on_cpu)


def _duplicate(request: PullRequest, base: str) -> list[str]:
    status = request.steps[-1].trailers.upstream_status
    named = [name.partition("#")[::2] for name in request.related]
    searches = [*(f"{number} in:body" for _, number in named), _search(request.title)]
    lines = [f"{base} lacks it: its tests fail there."]
    if status.startswith("Submitted"):
        lines = [f"This is {status.removeprefix('Submitted ').strip('[]')}."]
    if request.related:
        related = (f"- {reference}" for reference in request.related)
        lines += ["", "Related:", "", *related]
    return [
        *lines,
        "",
        "<!-- Before sending, run these and say here what they found:",
        *(
            f"gh issue view {number} --repo {repository} --comments"
            for repository, number in named
        ),
        *(
            f"gh pr list --repo vllm-project/vllm --state open --search '{search}'"
            for search in searches
        ),
        "-->",
    ]


def _search(title: str) -> str:
    """Words to search for: the platform, and the title's words without its verb."""
    platform = _PLATFORM.search(title)
    _, _, words = title.rpartition("]")[2].strip().partition(" ")
    about = _WORD.findall(words)
    return " ".join([*(platform.groups() if platform else ()), *about[:4]])


_WITHOUT = (
    "Without an XPU, in the repository that keeps these changes as patches and emulates"
    " the platform:"
)
_EMULATED = (
    "Emulated: vLLM's XPU code path runs on a CPU; PyTorch stands in for the ops of"
    " vllm-xpu-kernels, and Triton's interpreter for its compiler."
)
_DISCLOSURE = (
    "AI assistance was used to write this change, its tests and this text.",
    "",
    "- [ ] The submitter has reviewed every changed line, has run the tests and"
    " answers for the change.",
)
_SECTIONS = {
    "Purpose": _purpose,
    "Test Plan": _plan,
    "Test Result": _result,
    "Overview": _summary,
    "Claims": _claims,
    "Validation": _validation,
    "Details": _details,
}
