# SPDX-License-Identifier: Apache-2.0
"""V4 Vision and V4.1 beside their twins: the record, and the tables made of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from proof.e2e.records.twin_errors import DATA, PAGE, SECTIONS, keep, render, rows_of
from stack.core.markdown import with_section
from stack.core.project import Project
from stack.core.rows import read_rows

ROOT = Path(__file__).parents[3]
FOUND = {
    "0": {"core": 0.002, "output": 0.0, "plain": 0.05, "ratio": 0},
    "logits": {"plain": 0.1, "streams": 0.001},
    "1": {"core": 0.003, "output": 0.0, "plain": 0.04, "ratio": 2, "missed": 0.001},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_shows_the_record(section: str) -> None:
    shown = render(read_rows(ROOT / DATA), section)
    page = ROOT / PAGE
    assert with_section(page, section, shown) == page.read_text("utf-8")


def test_jobs_replace_their_own_rows_and_equal_releases_share_a_line(
    project_with: Callable[[str, str], Project],
) -> None:
    project = project_with(PAGE, "v41")
    page = project.root / PAGE
    page.write_text(f"{page.read_text()}<!-- vision: begin -->\n<!-- vision: end -->\n")
    worse = FOUND | {"0": FOUND["0"] | {"core": 0.009}}
    keep(project, rows_of("v0.32.0", "v4.1", "v4.1", worse))
    for release in ("v0.32.0", "v0.33.0"):
        keep(project, rows_of(release, "v4.1", "v4.1", FOUND))
    keep(project, rows_of("v0.33.0", "v4.1", "v4.1, chunks", FOUND))
    rows = read_rows(project.root / DATA)
    assert [row["layer"] for row in rows[:3]] == ["0", "1", "logits"]
    section = page.read_text().partition("<!-- v41: begin -->\n")[2]
    assert section.partition("<!-- v41: end -->")[0].splitlines()[2:] == [
        "| v4.1 | v0.33.0, v0.32.0 | 0.30 | 0.00 | 10.00 |",
        "| v4.1, chunks | v0.33.0 | 0.30 | 0.00 | 10.00 |",
    ]
