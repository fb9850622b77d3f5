# SPDX-License-Identifier: Apache-2.0
"""The engine's errors beside Hugging Face: the record, and the table made of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from proof.e2e.records import engine_errors
from stack.base.releases import load
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.core.rows import read_rows

ROOT = Path(__file__).parents[3]


def row(
    release: str, core: str, output: str, untouched: str = "", ratio: int = 1
) -> dict[str, str]:
    return {
        "release": release,
        "tokens": "9",
        "ratio": str(ratio),
        "core %, untouched": untouched,
        "core %, patched": core,
        "output %, untouched": untouched,
        "output %, patched": output,
    }


@pytest.fixture
def project(project_with: Callable[[str, str], Project]) -> Project:
    return project_with(engine_errors.PAGE, "figures")


def test_the_page_shows_the_record() -> None:
    page = (ROOT / engine_errors.PAGE).read_text()
    assert engine_errors.render(read_rows(ROOT / engine_errors.DATA)) in page


def test_every_release_has_its_figures() -> None:
    project = Project(ROOT)
    found = {row["release"] for row in read_rows(ROOT / engine_errors.DATA)}
    assert found == set(load(project).names)


def test_rows_replace_those_of_the_same_release(project: Project) -> None:
    older = [row("v0.22.1", "0.1", "0")]
    engine_errors.keep(project, "v0.22.1", older)
    engine_errors.keep(project, "v0.33.0", [row("v0.33.0", "9", "9", "99")])
    newer = [row("v0.33.0", "0.17", "0", "36"), row("v0.33.0", "0.2", "0", "174.6", 4)]
    engine_errors.keep(project, "v0.33.0", newer[::-1])
    found = read_rows(project.root / engine_errors.DATA)
    assert all(each.pop("made") and each.pop("tree_id") == "" for each in found)
    assert found == [*newer, *older]
    lines = (project.root / engine_errors.PAGE).read_text().splitlines()
    wanted = "| v0.33.0 | 36 to 175 % | 0.17 to 0.20 % | 36 to 175 % | 0.00 % |"
    assert lines[4] == wanted
    assert "| v0.22.1 | does not start | 0.10 % | does not start | 0.00 % |" in lines


def test_a_release_that_is_not_pinned_goes(project: Project) -> None:
    engine_errors.keep(project, "v0.33.0", [row("v0.33.0", "0.17", "0")])
    engine_errors.keep(project, "v9.0.0", [row("v9.0.0", "0.17", "0")])
    rows = read_rows(project.root / engine_errors.DATA)
    assert [one["release"] for one in rows] == ["v0.33.0"]


def test_a_figure_that_is_no_number_leaves_everything_as_it_was(
    project: Project,
) -> None:
    engine_errors.keep(project, "v0.33.0", [row("v0.33.0", "0.17", "0")])
    files = [project.root / engine_errors.DATA, project.root / engine_errors.PAGE]
    before = [file.read_bytes() for file in files]
    with pytest.raises(UsageError, match=r"core %, patched: .*≤ 0\.01") as problem:
        engine_errors.keep(project, "v0.22.1", [row("v0.22.1", "≤ 0.01", "0")])
    assert problem.value.hint == engine_errors.COMMAND
    assert [file.read_bytes() for file in files] == before
