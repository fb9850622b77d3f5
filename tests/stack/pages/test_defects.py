# SPDX-License-Identifier: Apache-2.0
"""The table of defects: its list and its figures."""

import dataclasses
import re
from pathlib import Path

import pytest
from fake_stack import FakeStack
from msgspec.structs import replace

from stack.base import releases
from stack.checks.checker import Checker
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages import defects
from stack.series.patch import load_series
from stack.series.result import Figure, Result

ROOT = Path(__file__).parents[3]


def test_every_defect_names_a_step_and_tests_that_exist() -> None:
    project = Project(ROOT)
    tests: dict[str, str] = {}
    for name in releases.load(project).names:
        for step in load_series(project, name):
            module = ROOT / str(step.trailers.test)
            # It may import its tests from a folder of its name.
            parts = module.parent.glob(f"{module.stem.removeprefix('test_')}/*.py")
            tests[step.slug] = "".join(it.read_text() for it in (module, *parts))
    for defect in defects.defects(project):
        assert defect.step in tests, defect.id
        names = re.findall(r"def (test_\w+)", tests[defect.step])
        assert any(re.search(defect.tests, name) for name in names), defect.tests


def test_a_list_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests/steps").mkdir(parents=True)
    (tmp_path / defects.LIST).write_text('[[defect]]\nid = "N1"\nfix = "x"\n')
    with pytest.raises(UsageError, match="unknown field `fix`"):
        defects.defects(Project(tmp_path))


def listed(stack: FakeStack, text: str) -> list[defects.Observation]:
    path = stack.project.root / defects.LIST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return defects.observations(stack.project, stack.cache)


def test_a_step_that_was_not_checked_has_no_figures(stack: FakeStack) -> None:
    text = '[[defect]]\nid = "N1"\nwhat = "a"\nstep = "{}"\n'
    slug = load_series(stack.project, "v1.0")[0].slug
    (row, *_) = [
        one for one in listed(stack, text.format(slug)) if one.release == "v1.0"
    ]
    assert (row.before, row.after) == (defects.UNPROVEN, defects.UNPROVEN)
    elsewhere = text.format("none") + '[defect.elsewhere]\n"v1.0" = "fixed"\n'
    (row, *_) = [one for one in listed(stack, elsewhere) if one.release == "v1.0"]
    assert (row.before, row.after) == ("fixed", "")


def test_figures_come_from_the_tests_that_the_entry_names(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    slug = load_series(stack.project, "v1.0")[0].slug
    real = Checker.proofs
    figures = (
        Figure("test_a[0]", "AssertionError: off by 4%\nassert 1 == 2", "off by 0.2%"),
        Figure("test_b", "AssertionError: another", ""),
    )
    result = Result("v1.0", slug, "test", "passed", figures=figures)
    monkeypatch.setattr(
        Checker,
        "proofs",
        lambda *args: [
            dataclasses.replace(proof, test=result) for proof in real(*args)
        ],
    )
    text = f'[[defect]]\nid = "N1"\nwhat = "a"\nstep = "{slug}"\ntests = "test_a"\n'
    row = next(one for one in listed(stack, text) if one.release == "v1.0")
    assert (row.before, row.after) == ("[0] off by 4%", "[0] off by 0.2%")
    page = stack.project.root / defects.PAGE
    page.parent.mkdir(exist_ok=True)
    page.write_text(
        "# Page\n<!-- defects: begin -->\nold\n<!-- defects: end -->\nend\n"
    )
    blank = replace(row, release="v2.0", before="no such step", after="", step="")
    (stack.project.root / defects.DATA).parent.mkdir()
    monkeypatch.setattr(defects, "stamp", lambda *_: {"tree_id": "t", "made": "d"})
    defects.write(stack.project, [row, blank])
    text = page.read_text()
    assert "where this was written: v2.0." in text
    assert (stack.project.root / defects.DATA).read_text() == (
        "id,defect,release,before,after,step,tree_id,made\n"
        f"N1,a,v1.0,[0] off by 4%,[0] off by 0.2%,{slug},t,d\n"
    )
    assert "old" not in text
    assert text.endswith("<!-- defects: end -->\nend\n")


def test_figures_of_an_earlier_check_are_kept(stack: FakeStack) -> None:
    row = defects.Observation("N1", "a", "v1.0", "off by 4%", "off by 0.2%", "first")
    page, data = stack.project.root / defects.PAGE, stack.project.root / defects.DATA
    data.parent.mkdir(parents=True)
    page.write_text("<!-- defects: begin -->\n<!-- defects: end -->\n")
    defects.write(stack.project, [row])
    text = data.read_text()
    unproven = replace(row, before=defects.UNPROVEN, after=defects.UNPROVEN)
    defects.write(stack.project, [unproven, replace(unproven, release="v2.0")])
    assert data.read_text() == text
    assert "before the steps' last change: v1.0." in page.read_text()
    assert "where this was written: v2.0." in page.read_text()
    defects.write(stack.project, [replace(unproven, step="another"), row])
    assert f"{defects.UNPROVEN},another" in data.read_text()
    defects.write(stack.project, [replace(row, before="off by 5%")])
    assert data.read_text() == text.replace("off by 4%", "off by 5%")
    assert "last change" not in page.read_text()


def test_the_record_has_each_defect_of_the_list(real_project: Project) -> None:
    rows = read_rows(real_project.root / defects.DATA)
    listed = {(one.id, one.what) for one in defects.defects(real_project)}
    assert {(row["id"], row["defect"]) for row in rows} == listed


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_the_page_has_the_sinks_figures_of_the_record(
    real_project: Project, part: str
) -> None:
    """Of v0.33.0, to three digits: before, at worst, and after."""
    [row] = [
        row
        for row in read_rows(real_project.root / defects.DATA)
        if row["release"] == "v0.33.0" and row["defect"].startswith(f"{part} drops")
    ]
    figure = r"\[\d+\] off by ([\d.]+)% .*?: ([\d.]+)%"
    before = re.findall(figure, row["before"])
    found = [
        [float(f"{float(number):.3g}") for number in (error, worst, after)]
        for (error, worst), (after, _) in zip(
            before, re.findall(figure, row["after"]), strict=True
        )
    ]
    page = (real_project.root / defects.PAGE).read_text()
    lines = page.partition(f"| N1 {part} ")[2].splitlines()[:3]
    shown = [re.findall(r"([\d.]+) %", line) for line in lines]
    assert [[float(number) for number in line] for line in shown] == found
