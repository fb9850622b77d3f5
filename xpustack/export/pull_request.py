# SPDX-License-Identifier: Apache-2.0
"""The texts of an export: one description per pull request, and a cover letter.

A description has the sections that the base's own template asks for, and its
checklist. It claims nothing that a check of this stack did not show.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from xpustack.checks.proof import Proof
from xpustack.checks.results import Result
from xpustack.core.markdown import table
from xpustack.export.upstream_form import TEST_HOME, upstream_test
from xpustack.series.patch import Step

TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
_DEFAULT = ("Purpose", "Test Plan", "Test Result")
_TITLE = re.compile(r"(?:\[[^\[\]]+\])+ \S")
_AI_BOX = re.compile(r"- \[ \] (?=AI assistance was used)")


@dataclass(frozen=True)
class PullRequest:
    """One planned pull request.

    `needs` are the slugs of the steps that must be merged first, `lines` the changed
    lines outside kernels and tests, `alone` the result of the exported commit's own
    test run, None if that was not requested.
    """

    step: Step
    proof: Proof
    branch: str
    mail: str
    lines: int
    needs: tuple[str, ...]
    alone: Result | None = None

    @property
    def for_upstream(self) -> bool:
        status = self.step.trailers.upstream_status
        return not status.startswith(("Inappropriate", "Backport"))

    @property
    def test(self) -> str:
        """The test's path upstream."""
        return upstream_test(self.step)


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


def title_problem(step: Step) -> str | None:
    """The reason why a subject cannot be a title upstream; None if it can."""
    if _TITLE.match(step.subject):
        return None
    return f"the subject {step.subject!r} does not start with a tag such as [XPU]"


def describe(request: PullRequest, template: Template, release: str) -> str:
    """The Markdown text of one pull request; its first line is the title."""
    lines = [f"# {request.step.subject}", ""]
    for heading in template.headings:
        lines += [f"## {heading}", "", *_SECTIONS[heading](request, release), ""]
    lines += ["## AI assistance", "", *_DISCLOSURE, ""]
    lines += ["## Not a duplicate", "", *_duplicate(request, release), ""]
    if template.checklist:
        lines += ["---", "", template.checklist, ""]
    return "\n".join(lines)


def cover(
    requests: Sequence[PullRequest], release: str, number: int, person: str
) -> str:
    """The cover letter: the pull requests, their order, and what is left to do."""
    rows = []
    for place, request in enumerate(requests, start=1):
        needs = ", ".join(f"`{slug}`" for slug in request.needs) or "nothing"
        status = request.step.trailers.upstream_status
        note = "" if request.for_upstream else f" ({status})"
        title = f"{request.step.subject}{note}"
        rows.append((place, title, f"`{request.branch}`", needs, request.lines))
    lines = [
        f"# {release} as pull requests, export {number}",
        "",
        table(("#", "title", "branch", "needs", "lines"), rows),
        "",
        "Lines are those outside kernels and tests; above 500 upstream asks for an"
        " RFC first.",
        "Each branch holds the commits before it. The first one also brings the test"
        f" package `{TEST_HOME}`, with what its test imports, and the CI job that runs"
        " it; later ones add to it.",
        "",
        "## Order",
        "",
        *(f"{index}. {line}" for index, line in enumerate(_waves(requests), start=1)),
        "",
        "## Apply",
        "",
        f"On an unpacked source archive of vLLM {release.removeprefix('v')} that is a"
        " git repository, or on a clone at that tag:",
        "",
        "```sh",
        "git am --keep-non-patch --keep-cr mails/*.patch",
        "```",
        "",
        "Without `--keep-non-patch` git drops the tags from the titles; without"
        " `--keep-cr` it refuses a change of a file that has CRLF.",
        "",
        "## Before sending",
        "",
        f"- Every commit is signed off by {person}, who certifies its origin (DCO).",
        "- Read every changed line; upstream refuses what no person answers for.",
        "- Rebase onto upstream's main branch; this was made on a release.",
        "- Search for open requests that do the same (the text of each has the"
        " command).",
        "- Run the tests, and an accuracy evaluation, on an Intel GPU. Nothing here"
        " was run on one.",
        "- `range-diff.txt`, if it exists, says what changed since the last export.",
    ]
    return "\n".join(lines) + "\n"


def _waves(requests: Sequence[PullRequest]) -> list[str]:
    """The slugs in waves; the pull requests of a wave can be sent together."""
    depth: dict[str, int] = {}
    for request in requests:
        depth[request.step.slug] = 1 + max(
            (depth[slug] for slug in request.needs), default=-1
        )
    waves: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for slug, level in depth.items():
        waves[level].append(f"`{slug}`")
    return [", ".join(wave) for wave in waves]


def _paragraphs(request: PullRequest) -> list[str]:
    return request.step.message.split("\n\n")


def _purpose(request: PullRequest, release: str) -> list[str]:
    lines = [request.step.message]
    if request.needs:
        lines += ["", _needs(request)]
    return lines


def _overview(request: PullRequest, release: str) -> list[str]:
    lines = [_paragraphs(request)[0]]
    if request.needs:
        lines += ["", _needs(request)]
    return lines


def _claims(request: PullRequest, release: str) -> list[str]:
    lines = [f"- {request.step.subject.rpartition(']')[2].strip()}."]
    if failure := request.step.trailers.failure:
        lines.append(
            f"- `{request.test}` fails on {release} with a message that matches"
            f" `{failure}`, and passes with this change."
        )
    lines.append(
        "- The platforms that it does not name keep their behaviour, where the tests"
        " cover it."
    )
    return lines


def _details(request: PullRequest, release: str) -> list[str]:
    rest = _paragraphs(request)[1:]
    lines = ["\n\n".join(rest)] if rest else []
    size = f"{request.lines} changed lines outside kernels and tests."
    return [*lines, "", size] if lines else [size]


def _plan(request: PullRequest, release: str) -> list[str]:
    return ["```sh", f"cd tests && pytest {request.test.removeprefix('tests/')}", "```"]


def _result(request: PullRequest, release: str) -> list[str]:
    test, lint = request.proof.test, request.proof.lint
    assert test is not None and lint is not None
    lines = [
        f"On {release}, on a CPU with the XPU platform emulated and Triton"
        " interpreted:",
        "",
        f"- tests: passed ({test.summary}) in {test.seconds:.0f} s, both trees"
        " together",
        f"- the repository's own hooks on the touched files: {lint.summary}",
    ]
    lines += [
        f"- `{figure.test}`: before {figure.before}; after {figure.after}"
        for figure in test.figures
    ]
    if request.alone is not None:
        lines.append(
            f"- this commit alone, its test run from `tests/`: {request.alone.summary}"
        )
    lines += ["", "Not run on an Intel GPU; no accuracy evaluation of a full model."]
    return lines


def _validation(request: PullRequest, release: str) -> list[str]:
    return [*_plan(request, release), "", *_result(request, release)]


def _needs(request: PullRequest) -> str:
    return "Needs " + ", ".join(f"`{slug}`" for slug in request.needs) + " first."


def _duplicate(request: PullRequest, release: str) -> list[str]:
    status = request.step.trailers.upstream_status
    words = " ".join(re.findall(r"[A-Za-z0-9_]{4,}", request.step.subject)[:6])
    lines = [f"{release} lacks it: see the test result."]
    if status.startswith("Submitted"):
        lines = [f"This is {status.removeprefix('Submitted ').strip('[]')}."]
    if related := request.step.trailers.related:
        lines += [
            "",
            "Related; the message says how this change differs:",
            "",
            *(f"- {reference}" for reference in related),
            "",
        ]
    return [
        *lines,
        "Open requests as of sending:",
        "",
        "```sh",
        f"gh pr list --repo vllm-project/vllm --state open --search '{words}'",
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
    "Overview": _overview,
    "Claims": _claims,
    "Validation": _validation,
    "Details": _details,
}
