# SPDX-License-Identifier: Apache-2.0
"""The matrix of splits over ranks: the record, and the table made of it."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from proof.e2e.records import ranks
from stack.base.releases import load
from stack.core.project import Project

ROOT = Path(__file__).parents[3]
CELL = ranks.Cell("v0.33.0", "TP 2", "plain", "equal", "")


def test_the_page_shows_the_record() -> None:
    record = ranks.cells(Project(ROOT))
    assert ranks.render([asdict(cell) for cell in record]) in (
        ROOT / ranks.PAGE
    ).read_text(encoding="utf-8")


def test_every_cell_is_of_a_pinned_release_and_says_why() -> None:
    project = Project(ROOT)
    for cell in ranks.cells(project):
        assert cell.release in load(project).names
        assert cell.found in ("equal", "near tie", "refused", "no such feature"), cell
        assert (cell.found == "equal") == (not cell.why), cell


def test_a_cell_replaces_the_one_before_it(
    project_with: Callable[[str, str], Project],
) -> None:
    project = project_with(ranks.PAGE, "ranks")
    older = replace(CELL, release="v0.22.1", found="refused", why="no stages")
    for cell in (older, replace(CELL, found="near tie", why="0.1"), CELL):
        ranks.keep(project, cell)
    found = ranks.cells(project)
    assert all(cell.made for cell in found)
    assert [replace(cell, made="") for cell in found] == [CELL, older]
    assert ranks.recorded(project, CELL) == "equal"
    missing = replace(CELL, ranks="TP 4")
    assert ranks.recorded(project, missing) == ranks.NOT_TRIED
    assert (
        "| v0.22.1 | TP 2 | refused | not tried |"
        in (project.root / ranks.PAGE).read_text()
    )
