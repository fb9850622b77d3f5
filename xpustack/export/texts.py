# SPDX-License-Identifier: Apache-2.0
"""The texts of an export, and its cover letter: the order, and what is left to do."""

from collections.abc import Sequence

from xpustack.core.markdown import table
from xpustack.core.rows import csv_text
from xpustack.export.pull_request import (
    TEXTS,
    PullRequest,
    Template,
    describe,
    requests_rows,
)
from xpustack.export.upstream_form import TEST_HOME

RFC = 500
"""Above so many changed lines outside kernels and tests upstream asks for an RFC."""
OPEN = 6
"""How many open requests upstream allows someone who may not write to it."""


def texts(
    template: Template,
    requests: Sequence[PullRequest],
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
    return {
        **described,
        "cover.md": cover(requests, base, number, person),
        "requests.csv": csv_text(requests_rows(requests)),
    }


def cover(requests: Sequence[PullRequest], base: str, number: int, person: str) -> str:
    """The cover letter: the pull requests, their order, and what is left to do."""
    rows = []
    for place, request in enumerate(requests, start=1):
        status = request.steps[-1].trailers.upstream_status
        note = "" if request.for_upstream else f" ({status})"
        title = f"{request.title}{note}"
        stands, first = request.stands, {*request.needs, *request.notes.after}
        if first and request.standing.state == "stands":
            count = len(first)
            stands = f"after {count} other step{'s' * (count > 1)}"
        kernels = f" + {request.kernels:,}" if request.kernels else ""
        lines = f"{request.lines}{kernels}"
        rows.append((place, title, f"`{request.branch}`", stands, lines))
    text = [
        f"# {base} as pull requests, export {number}",
        "",
        table(("#", "title", "branch", "stands", "lines"), rows),
        "",
        "A branch holds the commits that its step needs, and no others; its test is red"
        " before and green after its last commit. Lines are those outside kernels and"
        " tests, and after the plus those of new kernels; above"
        f" {RFC} of the former upstream asks for an RFC first. Each branch also brings"
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
        "- Link this repository where a text says how its tests run without an XPU, and"
        " replace the comment under `Not a duplicate` with what the searches found.",
        "- Run the tests, and an accuracy evaluation, on an Intel GPU. Nothing here"
        " was run on one.",
        "- `range-diff.txt`, if it exists, says what changed since the last export.",
    ]
    if "+g" not in base:
        text.insert(-1, "- Export again with `--onto CLONE`: this is on a release.")
    return "\n".join(text) + "\n"


def _order(requests: Sequence[PullRequest]) -> list[str]:
    """The requests by what can be done with them now."""
    groups: dict[str, list[str]] = {
        "Ready": [],
        "Ask first: an RFC is due, or something related is open or was merged": [],
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
        elif request.needs or request.also:
            beside = f"; {', '.join(request.related)}" if request.related else ""
            wait.append(f"{line}: {_nearest(request, requests)}{beside}")
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


def _nearest(request: PullRequest, requests: Sequence[PullRequest]) -> str:
    """The requests that one waits for, less those that these wait for themselves."""
    first = (*request.needs, *request.notes.after)
    commits = {commit.slug: each for each in requests for commit in each.commits}
    further = {
        slug for need in first if need in commits for slug in commits[need].needs
    }
    near = (slug for slug in first if slug not in further)
    names = dict.fromkeys(commits[n].slug if n in commits else n for n in near)
    rest = ", and what these need" if further else ""
    return f"after {', '.join(f'`{name}`' for name in names)}{rest}"
