# SPDX-License-Identifier: Apache-2.0
"""The texts of an export: a description of each request, the cover letter, the rows.

A description has the sections that the base's own template asks for, and its
checklist. `request.md.jinja` and `cover.md.jinja` have the words.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stack.core.markdown import rendered
from stack.core.rows import csv_text
from stack.series.static import LARGE
from stack.upstream.branches import branch_of
from stack.upstream.form import FIRST, FIRST_MESSAGE, TEST_HOME
from stack.upstream.pairs import Conflicts
from stack.upstream.pull_request import TEXTS, PullRequest, requests_rows

TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
_COLLAPSE = 4
"""From so many earlier commits on, a text folds their list."""
_DEFAULT = ("Purpose", "Test Plan", "Test Result")
_KNOWN = {*_DEFAULT, "Overview", "Claims", "Validation", "Details"}
_AI_BOX = re.compile(r"- \[ \] (?=AI assistance was used)")
_READY = "Ready"
_ASK = "Ask first: an RFC is due, or something related is open or was merged"
_WAIT = "Wait for another request"
_UPSTREAM = "Upstream has it: drop the step"
_OURS = "Not for upstream"
_OPEN = "Open: resolve the conflict or the test first"
_ORDER = (_READY, _ASK, _WAIT, _UPSTREAM, _OURS, _OPEN)


@dataclass(frozen=True)
class Template:
    """What the base asks of a description: its headings and its checklist."""

    headings: tuple[str, ...] = _DEFAULT
    checklist: str = ""

    @classmethod
    def read(cls, text: str) -> "Template":
        """From the base's own template. With unknown headings, use the three default
        ones."""
        headings = tuple(re.findall(r"(?m)^## (.+?)\s*$", text))
        if not headings or not set(headings) <= _KNOWN:
            headings = _DEFAULT
        box = re.search(r"(?s)<details>.*?</details>", text)
        return cls(headings, _AI_BOX.sub("- [x] ", box[0]) if box else "")


def texts(
    template: Template,
    requests: Sequence[PullRequest],
    conflicts: Conflicts,
    base: str,
    person: str,
    number: int,
) -> dict[str, str]:
    """What people read of an export, by its place in the folder."""
    described = {
        f"{TEXTS}/{request.slug}.md": describe(request, template, base)
        for request in requests
        if request.for_upstream and request.standing.state == "stands"
    }
    if any(request.on_first for request in requests):
        values = {"template": template, "message": FIRST_MESSAGE}
        values |= {"test_home": TEST_HOME}
        text = rendered("stack.upstream", "first.md", values)
        described = {f"{TEXTS}/{FIRST}.md": text, **described}
    return {
        **described,
        "cover.md": cover(requests, conflicts, base, number, person),
        "requests.csv": csv_text(requests_rows(requests)),
    }


def describe(request: PullRequest, template: Template, base: str) -> str:
    """The Markdown text of one pull request; its first line is the title."""
    values = {"request": request, "template": template, "base": base, "fold": _COLLAPSE}
    return rendered("stack.upstream", "request.md", values)


def cover(
    requests: Sequence[PullRequest],
    conflicts: Conflicts,
    base: str,
    number: int,
    person: str,
) -> str:
    """The cover letter: the pull requests, their order, and what is left to do."""
    order: dict[str, list[str]] = {heading: [] for heading in _ORDER}
    for request in requests:
        heading, why = _what_next(request, requests)
        order[heading].append(f"`{request.slug}`{f': {why}' if why else ''}")
    alone = sum(each.stands == "alone" for each in requests)
    values = {
        "requests": requests,
        "conflicts": conflicts,
        "pairs": alone * (alone - 1) // 2,
        "first": any(request.on_first for request in requests) and branch_of(FIRST),
        "order": order,
        "base": base,
        "number": number,
        "person": person,
        "rfc": LARGE,
        "test_home": TEST_HOME,
    }
    return rendered("stack.upstream", "cover.md", values)


def _what_next(
    request: PullRequest, requests: Sequence[PullRequest]
) -> tuple[str, str]:
    """What can be done with a request now, and why."""
    related = ", ".join(request.related)
    if request.standing.state == "upstream":
        return _UPSTREAM, request.standing.evidence
    if request.standing.state != "stands":
        return _OPEN, request.stands
    if not request.for_upstream:
        return _OURS, request.upstream_status
    if request.needs:
        first = _nearest(request, requests)
        return _WAIT, f"{first}; {related}" if related else first
    if request.lines > LARGE:
        size = f"{request.lines} lines"
        return _ASK, f"{related}, {size}" if related else size
    return (_ASK, related) if related else (_READY, "")


def _nearest(request: PullRequest, requests: Sequence[PullRequest]) -> str:
    """The requests that one waits for, less those that these wait for themselves."""
    first = request.needs
    commits = {commit.slug: each for each in requests for commit in each.commits}
    further = {
        slug for need in first if need in commits for slug in commits[need].needs
    }
    near = (slug for slug in first if slug not in further)
    names = dict.fromkeys(commits[n].slug if n in commits else n for n in near)
    rest = ", and what these need" if further else ""
    return f"after {', '.join(f'`{name}`' for name in names)}{rest}"
