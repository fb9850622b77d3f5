# SPDX-License-Identifier: Apache-2.0
"""The README's table: one row for each release, read from its series and its runs.

A step exists where a release has the fault that it fixes, so the steps say how far a
release comes without them. What a patched release does was seen end to end: that is
the row of its checkpoint in FP8 and MXFP4.
"""

import csv
import re
from collections.abc import Sequence
from typing import NamedTuple

from xpustack.base.releases import Release, Releases
from xpustack.core import markdown
from xpustack.core.project import Project
from xpustack.pages.defects import LIST, Defect, defects
from xpustack.pages.status import StepStatus, step_statuses

HEADS = ("release", "untouched", "defects fixed", "patched", "MTP draft", "wheel")
RUNS = "docs/data/checkpoints.csv"

_UNTOUCHED = {
    "platform-guards": "does not start",
    "router-op": "stops at its first layer of experts",
    "attention-decode": "serves, with wrong attention",
}
"""By the step that changes it: what serving with the untouched release does."""
_DRAFT = {
    "attention-layer": "missing → works",
    "mtp-weights": "does not load → works",
    "indexer-speculation": "wrong lengths → works",
}
"""By the step that changes it: speculation, untouched and patched."""


class Row(NamedTuple):
    """A release in the README's table."""

    release: str
    untouched: str
    fixed: int
    patched: str
    draft: str
    wheel: str

    def cells(self) -> tuple[str, ...]:
        return (
            self.release,
            self.untouched,
            str(self.fixed),
            self.patched,
            self.draft,
            f"`{self.wheel}`",
        )


def overview(project: Project, pinned: Releases) -> list[Row]:
    """One row for each pinned release, newest first.

    Raises:
        SeriesError: a series cannot be read.
        UsageError: the list of defects cannot be read.
    """
    statuses = step_statuses(project, pinned)
    listed = defects(project) if (project.root / LIST).is_file() else ()
    runs = _runs(project)
    rows = []
    for release in reversed(list(pinned)):
        steps = [status for status in statuses if status.release == release.name]
        rows.append(_row(release, steps, listed, runs.get(release.name, "not run")))
    return rows


def overview_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return markdown.table(HEADS, (row.cells() for row in rows))


def _runs(project: Project) -> dict[str, str]:
    """By release: what its engine did with a checkpoint like Flash's."""
    if not (project.root / RUNS).is_file():
        return {}
    found = {}
    with (project.root / RUNS).open(newline="") as file:
        for row in csv.DictReader(file):
            error = re.search(r"attention ([0-9.]+ %)", row["why"])
            if row["checkpoint"] == "flash":
                off = f", attention off by {error[1]}" if error else ""
                found[row["release"]] = f"{row['verdict']}{off}"
    return found


def _row(
    release: Release,
    steps: Sequence[StepStatus],
    listed: Sequence[Defect],
    patched: str,
) -> Row:
    slugs = {status.step for status in steps}
    fixed = {
        defect.id
        for defect in listed
        if defect.step in slugs and release.name not in defect.elsewhere
    }
    return Row(
        release.name,
        _first(_UNTOUCHED, slugs) or "untested",
        len(fixed),
        patched,
        _first(_DRAFT, slugs) or "untested",
        f"{release.version}+xpu.dsv4.{release.revision}",
    )


def _first(words: dict[str, str], slugs: set[str]) -> str | None:
    return next((text for slug, text in words.items() if slug in slugs), None)
