# SPDX-License-Identifier: Apache-2.0
"""Reads what `git diff --full-index --binary` writes: files and hunks.

`git diff` documents the format under "Generating patch text". Where a step would read
other lines than git, or do what no step may, that is a `DiffError`; all else that is
malformed git refuses when it applies the diff.

A step's own diff has no lines of blob ids: several releases share it, and their blobs
differ.

No library does this: unidiff reads only text, whatthepatch drops modes and hunk
headers.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stack.base.archive import path_problem

_GENERATED = ("PKG-INFO", "setup.cfg")
_FILE = re.compile(rb"diff --git a/(.+) b/\1")
_WITHOUT_HUNK = (b"new file ", b"deleted file ", b"old mode ", b"GIT binary patch")
_PARTS = re.compile(rb"^(?=diff --git )", re.MULTILINE)
_BODIES = re.compile(rb"^(?=@@ )", re.MULTILINE)
_PLACE = re.compile(rb"^@@ .*$", re.MULTILINE)
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")
_IDS = re.compile(
    rb"^index [0-9a-f]+\.\.[0-9a-f]+(?: \d+)?\n(?!GIT binary patch)", re.MULTILINE
)


class DiffError(ValueError):
    """A diff is malformed or does what a step may not do.

    Attributes:
        line: the line within the diff, counted from 1.
        path: the file of the diff, if it is known.
    """

    def __init__(self, message: str, line: int, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.path = path


@dataclass(frozen=True)
class Hunk:
    """One hunk; `lines` keep their first character and their line feed.

    `header` is its first line. A last line without a line feed in the file has
    none here either.
    """

    header: str
    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[bytes, ...]

    @property
    def before(self) -> list[bytes]:
        """The lines that the hunk expects, context included."""
        return [line[1:] for line in self.lines if line[:1] in b" -"]

    @property
    def changed(self) -> int:
        """Lines added plus lines removed."""
        return sum(line[:1] != b" " for line in self.lines)


@dataclass(frozen=True)
class FileDiff:
    """The change of one file. `creates` says that the tree before lacks it."""

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]

    @property
    def changed(self) -> int:
        """Changed lines over all hunks; 0 for a binary file."""
        return sum(hunk.changed for hunk in self.hunks)


def without_ids(diff: bytes) -> bytes:
    """A diff without its lines of blob ids. A binary change keeps them, because git
    applies none without."""
    return _IDS.sub(b"", diff)


def without_places(diff: bytes) -> bytes:
    """A diff without the line numbers of its hunks, and what git shows behind them."""
    return _PLACE.sub(b"@@", diff)


@functools.cache
def parse_diff(diff: bytes) -> tuple[FileDiff, ...]:
    """The files of a diff, in its order. Cached: releases share their patches.

    Raises:
        DiffError: bytes outside a file's diff, a path that leaves the tree or
            occurs twice, hunks that overlap or whose headers do not count
            their lines.
    """
    files: list[FileDiff] = []
    number = 1
    for part in filter(None, _PARTS.split(diff)):
        file = _file(part, number)
        number += part.count(b"\n")
        if any(file.path == other.path for other in files):
            raise DiffError("the diff changes the file twice", number, file.path)
        files.append(file)
    return tuple(files)


def forbidden(path: str) -> str | None:
    """Why no step may change or add the file `path`; None if a step may."""
    parts = path.split("/")
    if path in _GENERATED or any(part.endswith(".egg-info") for part in parts):
        return "the file is generated when an sdist is made: no step may change it"
    return None


def _file(part: bytes, start: int) -> FileDiff:
    """The change in one part of a diff, which begins at the line `start`."""
    head, *bodies = _BODIES.split(part)
    first, *more = _lines(head)
    header = _FILE.fullmatch(first)
    if header is None:
        raise DiffError("expected a line `diff --git a/PATH b/PATH`", start)
    path = header[1].decode("utf-8", "replace")
    problem = path_problem(path)
    if any(line.startswith((b"similarity ", b"rename ", b"copy ")) for line in more):
        problem = "renames and copies are not allowed"
    elif not (bodies or any(line.startswith(_WITHOUT_HUNK) for line in more)):
        problem = "the file has no hunk"
    created, deleted = (
        any(line.startswith(word) for line in more)
        for word in (b"new file mode ", b"deleted file mode ")
    )
    # Git ends a name that holds a blank with a tab.
    names = [line.removesuffix(b"\t") for line in more[-2:]]
    sides = (("--- a/", created), ("+++ b/", deleted))
    expected = [
        f"{side[:4]}/dev/null" if absent else side + path for side, absent in sides
    ]
    if bodies and names != [name.encode() for name in expected]:
        problem = f"expected the lines `{expected[0]}` and `{expected[1]}`"
    if problem:
        raise DiffError(problem, start, path)
    return FileDiff(path, created, tuple(_hunks(bodies, start + len(more) + 1, path)))


def _hunks(bodies: Iterable[bytes], number: int, path: str) -> Iterator[Hunk]:
    """The hunks of a file, of which the first begins at a line."""
    last, shift = 0, 0
    for body in bodies:
        hunk = _hunk(body, number, path)
        # A side without lines gives the number of the line before it (0 at the top).
        old_first = hunk.old_start + (hunk.old_count == 0)
        new_first = hunk.new_start + (hunk.new_count == 0)
        if old_first <= last or old_first + shift != new_first:
            problem = f"the hunk header {hunk.header} does not follow from those before"
            raise DiffError(problem, number, path)
        last = old_first + hunk.old_count - 1
        shift += hunk.new_count - hunk.old_count
        number += body.count(b"\n")
        yield hunk


def _hunk(body: bytes, number: int, path: str) -> Hunk:
    first, *rest = _lines(body)
    header = first.decode("utf-8", "replace")
    lines: list[bytes] = []
    for line in rest:
        if line.startswith(b"\\ ") and lines:
            lines[-1] = lines[-1].removesuffix(b"\n")
        else:
            lines.append(line + b"\n")
    match = _HUNK.fullmatch(first)
    if match is None:
        raise DiffError("malformed hunk header", number, path)
    old, new = (int(match[group] or 1) for group in (2, 4))
    marks = [line[:1] for line in lines]
    removed, added, kept = (marks.count(mark) for mark in (b"-", b"+", b" "))
    if (removed + kept, added + kept, removed + added + kept) != (old, new, len(lines)):
        problem = f"the hunk header {header} does not count its lines"
        raise DiffError(problem, number, path)
    return Hunk(header, int(match[1]), old, int(match[3]), new, tuple(lines))


def _lines(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")
