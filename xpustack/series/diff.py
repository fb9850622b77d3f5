# SPDX-License-Identifier: Apache-2.0
"""Reads what `git diff --full-index --binary` writes: files and hunks.

`git diff` documents the format under "Generating patch text". The parser accepts only
what a step may contain; anything else is a `DiffError`.

A step's own diff has no lines of blob ids: several releases share it, and their blobs
differ.

No library does this: unidiff reads only text, whatthepatch drops modes and hunk
headers, and both accept overlapping hunks and text after the last hunk.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xpustack.base.archive import path_problem as path_problem

_GENERATED = ("PKG-INFO", "setup.cfg")
_FILE = re.compile(rb'diff --git (?:a/(.+) b/\1|(".*))')
_INDEX = re.compile(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d{6}))?")
_NO_FILE = "expected a line `diff --git a/PATH b/PATH`"
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
    first, *lines = _lines(head)
    end = start + 1 + len(lines)

    def taken(*prefixes: bytes) -> str | None:
        """The rest of the next line, which goes, if it starts with a prefix."""
        for prefix in prefixes:
            if lines and lines[0].startswith(prefix):
                return lines.pop(0)[len(prefix) :].decode("utf-8", "replace")
        return None

    header = _FILE.fullmatch(first)
    if header is None:
        raise DiffError(_NO_FILE, start)
    if header[2] is not None:
        raise DiffError("the path needs quoting", start, header[2].decode("latin-1"))
    path = header[1].decode("utf-8", "replace")
    if problem := path_problem(path):
        raise DiffError(problem, start, path)
    created = taken(b"new file mode ") is not None
    deleted = taken(b"deleted file mode ") is not None
    changed = taken(b"old mode ") is not None
    if changed:
        taken(b"new mode ")
    if taken(b"similarity ", b"rename ", b"copy ") is not None:
        raise DiffError("renames and copies are not allowed", start, path)
    if lines and lines[0].startswith(b"index ") and not _INDEX.fullmatch(lines.pop(0)):
        raise DiffError("malformed line of blob ids", end - len(lines) - 1, path)
    if lines[:1] == [b"GIT binary patch"]:
        return FileDiff(path, created, ())
    if lines and lines[0].startswith(b"--- "):
        sides = (("--- ", f"a/{path}", created), ("+++ ", f"b/{path}", deleted))
        for mark, name, absent in sides:
            expected = "/dev/null" if absent else name
            # Git ends a name that holds a blank with a tab.
            if (taken(mark.encode()) or "").removesuffix("\t") != expected:
                line = end - len(lines) - 1
                raise DiffError(f"expected the line `{mark}{expected}`", line, path)
    if not (bodies or created or deleted or changed) or (bodies and lines):
        raise DiffError("the file has no hunk", end - len(lines), path)
    if lines:
        raise DiffError(_NO_FILE, end - len(lines))
    return FileDiff(path, created, tuple(_hunks(bodies, end, path)))


def _hunks(bodies: Iterable[bytes], number: int, path: str) -> Iterator[Hunk]:
    """The hunks of a file, of which the first begins at a line."""
    last, shift = 0, 0
    for body in bodies:
        hunk = _hunk(body, number, path)
        # A side without lines gives the number of the line before it (0 at the top).
        old_first = hunk.old_start + (hunk.old_count == 0)
        new_first = hunk.new_start + (hunk.new_count == 0)
        if old_first <= last or old_first + shift != new_first:
            raise DiffError(
                f"the hunk header {hunk.header} does not follow from the hunks before",
                number,
                path,
            )
        last = old_first + hunk.old_count - 1
        shift += hunk.new_count - hunk.old_count
        number += body.count(b"\n")
        yield hunk


def _hunk(body: bytes, number: int, path: str) -> Hunk:
    text, *rest = _lines(body)
    match = _HUNK.fullmatch(text)
    if match is None:
        raise DiffError("malformed hunk header", number, path)
    counts = [int(match[group] or 1) for group in (2, 4)]
    header = text.decode("utf-8", "replace")
    old, new, lines = *counts, list[bytes]()
    for position, line in enumerate(rest, start=number + 1):
        mark = line[:1]
        if line.startswith(b"\\ ") and lines and lines[-1].endswith(b"\n"):
            lines[-1] = lines[-1][:-1]
            continue
        if mark not in (b" ", b"-", b"+"):
            if old == new == 0:
                raise DiffError(_NO_FILE, position)
            break
        old -= mark != b"+"
        new -= mark != b"-"
        if min(old, new) < 0:
            break
        lines.append(line + b"\n")
    if old or new:
        problem = f"the hunk header {header} does not count its lines"
        raise DiffError(problem, number, path)
    return Hunk(
        header, int(match[1]), counts[0], int(match[3]), counts[1], tuple(lines)
    )


def _lines(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")
