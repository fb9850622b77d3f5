# SPDX-License-Identifier: Apache-2.0
"""The README's table: one row for each release, read from its series and its runs.

A release has a step only if it has the fault that the step fixes, so its steps tell
what the untouched release does. What the patched one does comes from the end-to-end run
of the checkpoint in FP8 and MXFP4.
"""

import re
from collections.abc import Sequence

from xpustack.base.releases import Release, Releases
from xpustack.core import markdown
from xpustack.core.project import Project
from xpustack.core.rows import read_rows
from xpustack.pages.defects import LIST, Defect, defects, fixed
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


def overview(project: Project, pinned: Releases) -> str:
    """One row for each pinned release, newest first, as a Markdown table.

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
    return markdown.table(HEADS, rows)


def _runs(project: Project) -> dict[str, str]:
    """By release: what its engine did with a checkpoint like Flash's."""
    found = {}
    for row in read_rows(project.root / RUNS):
        if row["checkpoint"] == "flash":
            error = re.search(r"attention ([0-9.]+ %)", row["why"])
            off = f", attention off by {error[1]}" if error else ""
            found[row["release"]] = f"{row['verdict']}{off}"
    return found


def _row(
    release: Release,
    steps: Sequence[StepStatus],
    listed: Sequence[Defect],
    patched: str,
) -> tuple[str, ...]:
    slugs = {status.step for status in steps}
    has = {(release.name, slug) for slug in slugs}
    return (
        release.name,
        _first(_UNTOUCHED, slugs) or "untested",
        str(len(fixed(listed, release.name, has))),
        patched,
        _first(_DRAFT, slugs) or "untested",
        f"`{release.version}+xpu.dsv4.{release.revision}`",
    )


def _first(words: dict[str, str], slugs: set[str]) -> str | None:
    return next((text for slug, text in words.items() if slug in slugs), None)
