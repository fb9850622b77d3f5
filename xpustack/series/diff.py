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
from dataclasses import dataclass

CREATES = "a patch may not create a file: bring it as overlay"
_GENERATED = ("PKG-INFO", "setup.cfg")
_FILE = re.compile(rb'diff --git (?:a/(.+) b/\1|(".*))')
_INDEX = re.compile(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d{6}))?")
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
    reader = _Reader(diff)
    files: list[FileDiff] = []
    while not reader.done:
        file = _file(reader)
        if any(file.path == other.path for other in files):
            raise DiffError("the diff changes the file twice", reader.number, file.path)
        files.append(file)
    return tuple(files)


def path_problem(path: str) -> str | None:
    """Why `path` cannot be a file of a tree; None if it can."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        return "the path leaves the tree"
    if "" in parts or "." in parts or "\\" in path or not path.isprintable():
        return "the path is not a plain relative path"
    if any(part.lower() == ".git" for part in parts):
        return "the path lies in .git"
    return None


def forbidden(path: str) -> str | None:
    """Why no step may change or add the file `path`; None if a step may."""
    parts = path.split("/")
    if path in _GENERATED or any(part.endswith(".egg-info") for part in parts):
        return "the file is generated when an sdist is made: no step may change it"
    return None


class _Reader:
    """Lines of a diff with one line of look-ahead."""

    def __init__(self, diff: bytes) -> None:
        self.lines = diff.split(b"\n")
        self.ends_with_line_feed = self.lines[-1] == b""
        if self.ends_with_line_feed:
            self.lines.pop()
        self.position = 0

    @property
    def done(self) -> bool:
        return self.position == len(self.lines)

    @property
    def number(self) -> int:
        return self.position + 1

    def peek(self) -> bytes:
        return b"" if self.done else self.lines[self.position]

    def take(self) -> bytes:
        line = self.peek()
        self.position += 1
        return line

    def take_after(self, prefix: bytes) -> str | None:
        """The rest of the next line if it starts with `prefix`, else None."""
        if self.done or not self.peek().startswith(prefix):
            return None
        return self.take()[len(prefix) :].decode("utf-8", "replace")


def _file(reader: _Reader) -> FileDiff:
    start = reader.number
    header = _FILE.fullmatch(reader.take())
    if header is None:
        raise DiffError("expected a line `diff --git a/PATH b/PATH`", start)
    if header[2] is not None:
        raise DiffError("the path needs quoting", start, header[2].decode("latin-1"))
    path = header[1].decode("utf-8", "replace")
    if problem := path_problem(path):
        raise DiffError(problem, start, path)
    created, deleted, changed = _modes(reader)
    for word in (b"similarity ", b"rename ", b"copy "):
        if reader.take_after(word) is not None:
            raise DiffError("renames and copies are not allowed", start, path)
    if reader.peek().startswith(b"index ") and not _INDEX.fullmatch(reader.take()):
        raise DiffError("malformed line of blob ids", reader.number - 1, path)
    if reader.peek() == b"GIT binary patch":
        _skip_binary(reader)
        return FileDiff(path, created, ())
    _names(reader, path, absent=(created, deleted))
    hunks = _hunks(reader, path)
    if not hunks and not (created or deleted or changed):
        raise DiffError("the file has no hunk", reader.number, path)
    return FileDiff(path, created, hunks)


def _modes(reader: _Reader) -> tuple[bool, bool, bool]:
    """Whether the extended header creates the file, deletes it, or changes its mode."""
    created = reader.take_after(b"new file mode ") is not None
    deleted = reader.take_after(b"deleted file mode ") is not None
    changed = reader.take_after(b"old mode ") is not None
    if changed:
        reader.take_after(b"new mode ")
    return created, deleted, changed


def _names(reader: _Reader, path: str, absent: tuple[bool, bool]) -> None:
    if not reader.peek().startswith(b"--- "):
        return
    sides = ((b"--- ", f"a/{path}", absent[0]), (b"+++ ", f"b/{path}", absent[1]))
    for mark, name, missing in sides:
        expected = "/dev/null" if missing else name
        # Git ends a name that holds a blank with a tab.
        actual = (reader.take_after(mark) or "").removesuffix("\t")
        if actual != expected:
            raise DiffError(
                f"expected the line `{mark.decode()}{expected}`",
                reader.number - 1,
                path,
            )


def _hunks(reader: _Reader, path: str) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    last, shift = 0, 0
    while reader.peek().startswith(b"@@ "):
        number = reader.number
        hunk = _hunk(reader, path)
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
        hunks.append(hunk)
    return tuple(hunks)


def _hunk(reader: _Reader, path: str) -> Hunk:
    number = reader.number
    text = reader.take()
    match = _HUNK.fullmatch(text)
    if match is None:
        raise DiffError("malformed hunk header", number, path)
    counts = [int(match[group] or 1) for group in (2, 4)]
    header = text.decode("utf-8", "replace")
    remaining, lines = list(counts), list[bytes]()
    while any(remaining) and min(remaining) >= 0:
        mark = reader.peek()[:1]
        if reader.done or mark not in (b" ", b"-", b"+"):
            break
        remaining[0] -= mark != b"+"
        remaining[1] -= mark != b"-"
        lines.append(reader.take() + b"\n")
        if reader.peek().startswith(b"\\ "):
            reader.take()
            lines[-1] = lines[-1][:-1]
    if any(remaining) or (reader.peek()[:1] in (b" ", b"+", b"-") and not reader.done):
        raise DiffError(
            f"the hunk header {header} does not count its lines", number, path
        )
    return Hunk(
        header, int(match[1]), counts[0], int(match[3]), counts[1], tuple(lines)
    )


def _skip_binary(reader: _Reader) -> None:
    reader.take()
    while not reader.done and not reader.peek().startswith(b"diff --git "):
        reader.take()
