# SPDX-License-Identifier: Apache-2.0
"""Says why a step's diff does not fit a tree: which hunk, and both sides."""

import difflib
from collections.abc import Mapping, Sequence

from xpustack.core.errors import ApplyError
from xpustack.core.repository import TreeEntry
from xpustack.series.diff import FileDiff, Hunk
from xpustack.series.tree import Step

SHOWN = 16
"""How many lines of a mismatch an error shows at most."""


def misfit(
    step: Step,
    entries: Mapping[str, TreeEntry],
    contents: Mapping[str, bytes],
    refusal: str,
) -> ApplyError:
    """The error for a diff that git refuses.

    Args:
        entries: the files of the tree before the step.
        contents: those blobs of them that the diff changes.
        refusal: what git says.
    """
    for file in step.files:
        entry = entries.get(file.path)
        if entry is None:
            return ApplyError("the tree has no such file to patch", path=file.path)
        if error := _hunk_misfit(file, contents[entry.blob]):
            return error
    return ApplyError("git refuses the patch", detail=refusal)


def _hunk_misfit(file: FileDiff, content: bytes) -> ApplyError | None:
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    for number, hunk in enumerate(file.hunks, start=1):
        first = hunk.old_start - (hunk.old_count > 0)
        if not _found(lines, hunk.before):
            return ApplyError(
                f"hunk {number} of {len(file.hunks)} ({hunk.header}) does not fit",
                path=file.path,
                detail=_sides(hunk, lines[first : first + hunk.old_count]),
            )
    return None


def _found(lines: Sequence[bytes], expected: Sequence[bytes]) -> bool:
    """Whether the expected lines are in a row somewhere."""
    size = len(expected)
    return any(
        lines[start : start + size] == list(expected)
        for start in range(len(lines) - size + 1)
    )


def _sides(hunk: Hunk, actual: Sequence[bytes]) -> list[str]:
    def text(lines: Sequence[bytes]) -> list[str]:
        return [line.decode("utf-8", "replace").rstrip("\n") for line in lines]

    diff = difflib.unified_diff(text(hunk.before), text(actual), lineterm="", n=3)
    lines = list(diff)[3:]
    surplus = len(lines) - SHOWN
    if surplus > 0:
        lines = [*lines[:SHOWN], f"... {surplus} more lines"]
    return [
        f"from line {hunk.old_start} on (- the patch expects, + the tree has):",
        *lines,
    ]
