# SPDX-License-Identifier: Apache-2.0
"""The README's table: one row for each release, read from its series and its runs.

What the untouched release does comes from the run of both side by side. What the
patched one does comes from the run of a checkpoint in FP8 and MXFP4, if it was of the
tree that the wheel is made of.
"""

import re
from collections.abc import Sequence

from stack.base.releases import Release, Releases
from stack.core import markdown
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages.defects import LIST, Defect, defects, fixed
from stack.pages.made import FOLDER, is_current
from stack.pages.status import StepStatus, step_statuses

HEADS = ("release", "untouched", "defects fixed", "patched", "wheel")
RUNS = f"{FOLDER}/checkpoints.csv"
SIDE_BY_SIDE = f"{FOLDER}/e2e.csv"


def overview(project: Project, pinned: Releases) -> str:
    """One row for each pinned release, newest first, as a Markdown table.

    Raises:
        SeriesError: a series cannot be read.
        UsageError: the list of defects cannot be read.
    """
    statuses = step_statuses(project, pinned)
    listed = defects(project) if (project.root / LIST).is_file() else ()
    untouched, patched = _untouched(project), _patched(project)
    rows = []
    for release in reversed(list(pinned)):
        steps = [status for status in statuses if status.release == release.name]
        before = untouched.get(release.name, "not run")
        after = patched.get(release.name, "not run on this revision")
        rows.append(_row(release, steps, listed, before, after))
    return markdown.table(HEADS, rows)


def _untouched(project: Project) -> dict[str, str]:
    """By release: how far the attention of the release alone is off, of each layer of
    each request that was asked of both."""
    found: dict[str, list[float]] = {}
    for row in read_rows(project.root / SIDE_BY_SIDE):
        figures = found.setdefault(row["release"], [])
        if figure := row["core %, untouched"]:
            figures.append(float(figure))
    return {
        release: f"attention off by {min(figures):.0f} to {max(figures):.0f} %"
        if figures
        else "does not start"
        for release, figures in found.items()
    }


def _patched(project: Project) -> dict[str, str]:
    """By release: what the engine of its tree did with a checkpoint like Flash's."""
    found = {}
    for row in read_rows(project.root / RUNS):
        if row["checkpoint"] == "flash" and is_current(project, row):
            error = re.search(r"attention ([0-9.]+ %)", row["why"])
            off = f", attention off by {error[1]}" if error else ""
            found[row["release"]] = f"{row['verdict']}{off}"
    return found


def _row(
    release: Release,
    steps: Sequence[StepStatus],
    listed: Sequence[Defect],
    untouched: str,
    patched: str,
) -> tuple[str, ...]:
    has = {(release.name, status.step) for status in steps}
    return (
        release.name,
        untouched,
        str(len(fixed(listed, release.name, has))),
        patched,
        f"`{release.version}+xpu.dsv4.{release.revision}`",
    )
