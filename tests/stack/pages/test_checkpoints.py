# SPDX-License-Identifier: Apache-2.0
"""The table of checkpoints: the record, and the page made of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proof.e2e.records import checkpoints
from stack.base.releases import load
from stack.core.errors import UsageError
from stack.core.project import Project

ROOT = Path(__file__).parents[3]
CELL = checkpoints.Cell("v0.33.0", "flash", "Flash", "serves", "attention 0.2 %")


@pytest.fixture
def project(project_with: Callable[[str, str], Project]) -> Project:
    return project_with(checkpoints.PAGE, "checkpoints")


def test_the_page_shows_the_record() -> None:
    project = Project(ROOT)
    page = (ROOT / checkpoints.PAGE).read_text()
    releases = tuple(reversed(load(project).names))
    assert checkpoints.render(checkpoints.cells(project), releases) in page


def test_every_cell_is_of_a_pinned_release_and_has_a_reason() -> None:
    project = Project(ROOT)
    record = checkpoints.cells(project)
    assert {cell.release for cell in record} <= set(load(project).names)
    assert all(cell.why for cell in record)


def test_verdicts_and_reasons_fit_the_table() -> None:
    record = checkpoints.cells(Project(ROOT))
    assert {cell.verdict for cell in record} <= {"serves", "refuses"}
    long = [(cell.release, cell.checkpoint) for cell in record if len(cell.why) > 300]
    assert not long, f"messages that nobody reads: {long}"


def test_a_cell_replaces_the_one_before_it(project: Project) -> None:
    older = replace(CELL, release="v0.22.1")
    for cell in (older, CELL, replace(CELL, verdict="wrong", why="experts 30 %")):
        checkpoints.keep(project, cell)
    kept = checkpoints.cells(project)
    assert [cell.release for cell in kept] == ["v0.33.0", "v0.22.1"]
    assert kept[0].why == "experts 30 %"
    page = (project.root / checkpoints.PAGE).read_text()
    assert "| v0.33.0 | wrong |" in page
    assert "| v0.32.0 | not run |" in page


def test_a_release_that_is_gone_leaves_the_record(project: Project) -> None:
    checkpoints.keep(project, replace(CELL, release="v0.1.0"))
    assert checkpoints.cells(project) == ()


def test_a_cell_that_nobody_ran_is_an_error(project: Project) -> None:
    with pytest.raises(UsageError, match="no result of serving flash"):
        checkpoints.recorded(project, "v0.33.0", "flash")


def test_other_columns_are_refused(project: Project) -> None:
    (project.root / checkpoints.DATA).write_text("release,verdict\n")
    with pytest.raises(UsageError, match="other columns"):
        checkpoints.cells(project)
