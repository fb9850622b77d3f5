# SPDX-License-Identifier: Apache-2.0
"""What a person wrote for reviewers beside a step's message.

`patches/<step>/request.md` starts with lines `Title:`, `With:` and `After:`, all
optional, and has sections of the names in `SECTIONS`. Each says only what somebody ran
or read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from stack.core.errors import SeriesError, concerning
from stack.core.files import read_file
from stack.core.project import Project

NAME = "request.md"
SECTIONS = (
    *("Overview", "Motivation", "Root cause", "Alternatives", "Limits"),
    "Ran elsewhere",
)
_LINE = re.compile(r"(Title|With|After): (.+)")


@dataclass(frozen=True)
class Notes:
    """The notes on a step's request.

    Attributes:
        title: of the request, where the step's subject does not say enough.
        along: the earlier steps that are commits of the same request.
        after: the steps that must be merged first although its tests pass without them.
        sections: the texts by their headings.
    """

    title: str = ""
    along: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)


def read_notes(project: Project, slug: str) -> Notes:
    """The notes of a step; empty where nobody wrote any. Title and sections that it
    lacks are those of the steps that it takes along.

    Raises:
        SeriesError: a line or a heading is none of those that are known.
    """
    path = project.patches / slug / NAME
    try:
        with concerning(step=slug):
            text = read_file(path, project.root).decode("utf-8")
    except FileNotFoundError:
        return Notes()
    head, *parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    known: dict[str, str] = {}
    for line in head.split("\n"):
        match = _LINE.fullmatch(line)
        if line and match is None:
            raise _refuse(
                slug, path, f"{line!r} is neither `Title: `, `With: ` nor `After: `"
            )
        if match is not None:
            known[match[1]] = match[2]
    sections = dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))
    for heading in sections:
        if heading not in SECTIONS:
            raise _refuse(slug, path, f"there is no section {heading!r}")
    along = tuple(known.get("With", "").split())
    title = known.get("Title", "")
    for notes in (read_notes(project, step) for step in along):
        title, sections = title or notes.title, {**notes.sections, **sections}
    return Notes(title, along, tuple(known.get("After", "").split()), sections)


def _refuse(slug: str, path: object, message: str) -> SeriesError:
    return SeriesError(
        message,
        step=slug,
        path=str(path),
        hint=f"use {', '.join(SECTIONS)}: CONTRIBUTING.md, words for a reviewer",
    )
