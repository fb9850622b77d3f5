# SPDX-License-Identifier: Apache-2.0
"""Checks that a step's diff fits a tree exactly: same blobs, lines and places."""

import difflib
from collections.abc import Sequence

from xpustack.core.errors import ApplyError
from xpustack.core.repository import TreeEntry
from xpustack.series.diff import FileDiff, Hunk
from xpustack.series.order import redo
from xpustack.series.patch import Step

SHOWN = 16
"""How many lines of a mismatch an error shows at most."""


def check_fit(
    step: Step, file: FileDiff, entry: TreeEntry | None, content: bytes
) -> None:
    """Require that a file of the tree is the one that a diff was made on.

    Args:
        entry: the file in the tree, None if the tree lacks it.
        content: its bytes, empty if it is absent.

    Raises:
        ApplyError: the tree has another file there. The error names release, step, file
            and the first hunk that differs, and shows both sides.
    """
    if file.creates:
        raise _error(
            step, file.path, "a patch may not create a file: bring it as overlay", []
        )
    if entry is None:
        raise _error(step, file.path, "the tree has no such file to patch", [])
    if file.old_mode != entry.mode:
        raise _error(
            step,
            file.path,
            f"the patch expects mode {file.old_mode}, the tree has {entry.mode}",
            [],
        )
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    blobs = [
        f"the patch was made on blob {file.old_id},",
        f"the tree before the step has {entry.blob}",
    ]
    for number, hunk in enumerate(file.hunks, start=1):
        first = hunk.old_start - (hunk.old_count > 0)
        actual = lines[first : first + hunk.old_count]
        if actual == hunk.before:
            continue
        place = f"hunk {number} of {len(file.hunks)} ({hunk.header})"
        offset = _offset(lines, hunk.before, first)
        raise _error(
            step,
            file.path,
            f"{place} does not fit"
            if offset is None
            else f"{place} fits only with an offset of {offset:+d} lines",
            [*blobs, *_sides(hunk, hunk.before, actual)],
        )
    if file.old_id and file.old_id != entry.blob:
        raise _error(
            step,
            file.path,
            "the hunks fit, yet the file is not the one that the patch was made on:"
            " a step is missing or the order is wrong",
            [*blobs, *(f"hunk {hunk.header}" for hunk in file.hunks)],
        )


def check_result(step: Step, file: FileDiff, entry: TreeEntry | None) -> None:
    """Require that applying a diff gave the blob and mode that it names.

    Raises:
        ApplyError: it did not; the patch was probably edited by hand.
    """
    expected = None if file.deletes else TreeEntry(file.new_mode, file.new_id)
    if entry is not None and not file.new_id:
        expected = TreeEntry(file.new_mode, entry.blob)
    if entry != expected:
        raise _error(
            step,
            file.path,
            "the patch does not give the blob that it names: was it edited by hand?",
            [f"the patch names {expected}", f"applying it gives {entry}"],
        )


def _offset(
    lines: Sequence[bytes], expected: Sequence[bytes], first: int
) -> int | None:
    """How many lines from `first` the expected lines are; None if they are absent."""
    size = len(expected)
    places = (
        [
            start - first
            for start in range(len(lines) - size + 1)
            if lines[start] == expected[0]
            and lines[start : start + size] == list(expected)
        ]
        if size
        else []
    )
    return min(places, key=abs, default=None)


def _sides(hunk: Hunk, expected: Sequence[bytes], actual: Sequence[bytes]) -> list[str]:
    def text(lines: Sequence[bytes]) -> list[str]:
        return [line.decode("utf-8", "replace").rstrip("\n") for line in lines]

    diff = difflib.unified_diff(text(expected), text(actual), lineterm="", n=3)
    lines = list(diff)[3:]
    surplus = len(lines) - SHOWN
    if surplus > 0:
        lines = [*lines[:SHOWN], f"... {surplus} more lines"]
    return [
        f"from line {hunk.old_start} on (- the patch expects, + the tree has):",
        *lines,
    ]


def _error(step: Step, path: str, message: str, detail: list[str]) -> ApplyError:
    return ApplyError(
        message,
        release=step.release,
        step=step.slug,
        path=path,
        detail=detail,
        hint=redo(step.release, step.path),
    )
