# SPDX-License-Identifier: Apache-2.0
"""The texts of an export: one description per pull request, and a cover letter.

A description has the sections that the base's own template asks for, and its
checklist. It claims nothing that a check of this stack did not show.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from xpustack.checks.results import Result
from xpustack.core.markdown import table
from xpustack.export.notes import Notes
from xpustack.export.upstream_form import TEST_HOME, upstream_test
from xpustack.series.tree import Series, Step, StepTree

TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
RFC = 500
"""Above so many changed lines outside kernels and tests upstream asks for an RFC."""
OPEN = 6
"""How many open requests upstream allows someone who may not write to it."""
_DEFAULT = ("Purpose", "Test Plan", "Test Result")
_TITLE = re.compile(r"(?:\[[^\[\]]+\])+ \S")
_SENTENCE = re.compile(r"(?<=[a-z)'`%][.]) (?=[A-Z]|vLLM)")
_SUMMARY = re.compile(r"(\d+) tests, (\d+) fail before(?:, (\d+) on a CPU too)?")
_AI_BOX = re.compile(r"- \[ \] (?=AI assistance was used)")
State = Literal["stands", "upstream", "conflict", "waits", "fails"]


@dataclass(frozen=True)
class Standing:
    """Where a step stands.

    Attributes:
        state: `stands` with a tested tree; `upstream` has the change; `conflict` with
            the base; `waits` for a step that does not stand; `fails` its own test
            wherever it was put.
        needs: the earlier steps that it needs, oldest first.
        series: the base, those steps and the step; None if it does not stand.
        test: its own test, red on the tree before and green on its tree.
        evidence: why it does not stand, or why upstream has it.
    """

    step: StepTree
    state: State
    needs: tuple[str, ...] = ()
    series: Series | None = None
    test: Result | None = None
    evidence: str = ""

    @property
    def slug(self) -> str:
        return self.step.slug

    @property
    def text(self) -> str:
        """Such as `alone`, or `after merge-once`."""
        if self.state == "stands":
            return f"after {', '.join(self.needs)}" if self.needs else "alone"
        return self.state


@dataclass(frozen=True)
class PullRequest:
    """One planned pull request.

    Attributes:
        commits: where its own steps stand, oldest first; the last names it.
        notes: what a person wrote for its reviewers.
        lines: the changed lines outside kernels and tests.
        lint: what the base's own hooks say of the branch.
        labels: those that the base's rules give it.
        alone: the result of the exported commit's own test run, None if that was not
            asked for.
    """

    commits: tuple[Standing, ...]
    notes: Notes
    branch: str
    lines: int
    lint: str = ""
    labels: tuple[str, ...] = ()
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


def cover(requests: Sequence[PullRequest], base: str, number: int, person: str) -> str:
    """The cover letter: the pull requests, their order, and what is left to do."""
    rows = []
    for place, request in enumerate(requests, start=1):
        status = request.steps[-1].trailers.upstream_status
        note = "" if request.for_upstream else f" ({status})"
        title = f"{request.title}{note}"
        rows.append(
            (place, title, f"`{request.branch}`", request.stands, request.lines)
        )
    lines = [
        f"# {base} as pull requests, export {number}",
        "",
        table(("#", "title", "branch", "stands", "lines"), rows),
        "",
        "A branch holds the commits that its step needs, and no others; its test is red"
        " before and green after its last commit. Lines are those outside kernels and"
        f" tests; above {RFC} upstream asks for an RFC first. Each branch also brings"
        f" what its test needs of the package `{TEST_HOME}`, and the CI jobs that run"
        " it, which name the files that it changes. Once a request is merged, export"
        " the others again onto the new commit: they then add to package and jobs.",
        "",
        "## Order",
        "",
        *_order(requests),
        "## Apply",
        "",
        "The mails of a branch, on a clone at the same commit:",
        "",
        "```sh",
        "git am --keep-non-patch --keep-cr mails/STEP/*.patch",
        "```",
        "",
        "Without `--keep-non-patch` git drops the tags from the titles; without"
        " `--keep-cr` it refuses a change of a file that has CRLF.",
        "",
        "## Before sending",
        "",
        f"- Who may not write to upstream has at most {OPEN} open requests.",
        f"- Every commit is signed off by {person}, who certifies its origin (DCO).",
        "- Read every changed line; upstream refuses what no person answers for.",
        "- Look at the open requests under Related, and search for others (the text of"
        " each request has the command).",
        "- Run the tests, and an accuracy evaluation, on an Intel GPU. Nothing here"
        " was run on one.",
        "- `range-diff.txt`, if it exists, says what changed since the last export.",
    ]
    if "+g" not in base:
        lines.insert(-1, "- Export again with `--onto CLONE`: this is on a release.")
    return "\n".join(lines) + "\n"


def _order(requests: Sequence[PullRequest]) -> list[str]:
    """The requests by what can be done with them now."""
    groups: dict[str, list[str]] = {
        "Ready": [],
        "Ask first: an RFC, or an open request that is related": [],
        "Wait for another request": [],
        "Upstream has it: drop the step": [],
        "Not for upstream": [],
        "Open: resolve the conflict or the test first": [],
    }
    ready, ask, wait, has, ours, open_ = groups.values()
    for request in requests:
        state, line = request.standing.state, f"- `{request.slug}`"
        if state == "upstream":
            has.append(f"{line}: {request.standing.evidence}")
        elif state != "stands":
            open_.append(f"{line}: {request.stands}")
        elif not request.for_upstream:
            ours.append(f"{line}: {request.steps[-1].trailers.upstream_status}")
        elif request.needs:
            wait.append(f"{line}: {request.stands}")
        elif request.related or request.lines > RFC:
            size = [f"{request.lines} lines"] if request.lines > RFC else []
            ask.append(f"{line}: {', '.join([*request.related, *size])}")
        else:
            ready.append(line)
    lines = []
    for heading, group in groups.items():
        if group:
            lines += [f"### {heading}", "", *group, ""]
    return lines


def _summary(request: PullRequest, base: str) -> list[str]:
    return [_short(request), *_context(request)]


def _short(request: PullRequest) -> str:
    """The first two sentences of the message."""
    first = request.steps[-1].message.partition("\n\n")[0]
    return " ".join(_SENTENCE.split(first.replace("\n", " "))[:2])


def _context(request: PullRequest) -> list[str]:
    """What a reviewer looks at first, and what must be merged first."""
    lines = []
    if request.related:
        lines += ["", f"Related: {', '.join(request.related)}."]
    if request.needs:
        names = ", ".join(f"`{slug}`" for slug in request.needs)
        lines += ["", f"Needs {names} first."]
    return lines


def _purpose(request: PullRequest, base: str) -> list[str]:
    message = request.steps[-1].message
    return [message, *_context(request), "", *_reasons(request)]


def _claims(request: PullRequest, base: str) -> list[str]:
    lines = []
    for standing, path in zip(request.commits, request.tests, strict=True):
        tests, red, _ = _counts(standing)
        lines += [
            f"- {standing.step.step.subject.rpartition(']')[2].strip()}.",
            f"- Tests in `{path}`: {red} of {tests} red without it, all green with it.",
        ]
    lines.append(
        "- The platforms that it does not name keep their behaviour, where the tests"
        " cover it."
    )
    return lines


def _details(request: PullRequest, base: str) -> list[str]:
    message = request.steps[-1].message
    own = [] if message.replace("\n", " ") == _short(request) else [message, ""]
    return [*own, *_reasons(request)]


def _reasons(request: PullRequest) -> list[str]:
    """The messages of the commits before the last, a person's words, and the size."""
    lines: list[str] = []
    for step in reversed(request.steps[:-1]):
        lines += [f"### First commit: {step.subject}", "", step.message, ""]
    for heading, text in request.notes.sections.items():
        if heading != "Ran elsewhere":
            lines += [f"### {heading}", "", text, ""]
    size = f"{request.lines} changed lines outside kernels and tests."
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
    lines += ["", "Without an XPU, in the repository of this patch stack:", "", "```sh"]
    lines += [
        f"tox -e apply-and-test -- {release} {step.slug}" for step in request.steps
    ]
    return [*lines, "```"]


def _result(request: PullRequest, base: str) -> list[str]:
    rows = []
    for standing, path in zip(request.commits, request.tests, strict=True):
        test = standing.test
        assert test is not None, "it stands"
        where = "CPU, the XPU platform emulated, Triton interpreted"
        if on_cpu := _counts(standing)[2]:
            where += f"; {on_cpu} of them on vLLM's CPU platform as well"
        rows.append((f"`{path}`, before and after", where, f"passed ({test.summary})"))
    rows.append(("the repository's own hooks on the touched files", "-", request.lint))
    if request.alone is not None:
        what = "the branch, its test run from `tests/`"
        rows.append((what, "as above", request.alone.summary))
    rows.append(("any of it", "an Intel GPU", "**not run**"))
    if "Ran elsewhere" not in request.notes.sections:
        rows.append(("any of it", "CUDA, ROCm", "not run"))
    rows.append(("an accuracy evaluation of a full model", "-", "**not run**"))
    lines = [f"On {base}:", "", table(("what", "where", "result"), rows)]
    if text := request.notes.sections.get("Ran elsewhere"):
        lines += ["", text]
    figures = [
        (f"`{figure.test}`", figure.before, figure.after or "passes")
        for standing in request.commits
        for figure in (standing.test.figures if standing.test else ())
    ]
    if figures:
        lines += ["", "Red before, green after:", ""]
        lines.append(table(("test", "before", "after"), figures))
    return lines


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
    subject = request.title.rpartition("]")[2]
    words = " ".join(re.findall(r"[A-Za-z0-9_]{4,}", subject)[:6])
    numbers = [name.rpartition("#")[2] for name in request.related]
    searches = [*(f"{number} in:body" for number in numbers), words]
    lines = [f"{base} lacks it: see the test result."]
    if status.startswith("Submitted"):
        lines = [f"This is {status.removeprefix('Submitted ').strip('[]')}."]
    if request.related:
        lines += [
            "",
            "Related; compare with these before sending:",
            "",
            *(f"- {reference}" for reference in request.related),
            "",
        ]
    return [
        *lines,
        "Read and search again before sending:",
        "",
        "```sh",
        *(
            f"gh issue view {number} --repo vllm-project/vllm --comments"
            for number in numbers
        ),
        *(
            f"gh pr list --repo vllm-project/vllm --state open --search '{search}'"
            for search in searches
        ),
        "```",
    ]


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
