# SPDX-License-Identifier: Apache-2.0
"""`docs/sample` is what an export of one step writes, without upstream's checklist.

    xpustack export v0.33.0 cpu-tile-scheduler --author 'A Person <person@localhost>'

makes it anew; `--as-a-user` compares, which takes minutes.
"""

import subprocess
from pathlib import Path

import pytest

from stack.core.project import Project
from stack.core.rows import read_rows
from stack.series.order import read_patches

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "docs/sample"
RELEASE, STEP = "v0.33.0", "cpu-tile-scheduler"
AUTHOR = "A Person <person@localhost>"
RULE = "\n---\n"
"""Behind it a request has the checklist of upstream's own template."""


def test_its_words_are_those_of_the_step() -> None:
    text = (SAMPLE / f"{STEP}.md").read_text()
    title, _, said = (ROOT / f"patches/{STEP}/request.md").read_text().partition("\n\n")
    assert text.startswith(f"# {title.removeprefix('Title: ')}\n")
    for part in said.split("\n## ")[1:]:
        assert part.partition("\n\n")[2].strip() in text
    assert STEP in read_patches(Project(ROOT), RELEASE)


def test_its_figures_are_those_of_the_rows() -> None:
    [row] = [
        row
        for row in read_rows(ROOT / "docs/data/requests.csv")
        if (row["release"], row["step"]) == (RELEASE, STEP)
    ]
    passed, failed, *_ = (words.split()[0] for words in row["test"].split(", "))
    text = (SAMPLE / f"{STEP}.md").read_text()
    assert f"{passed} passed, {failed} of them failed before" in text
    assert f"| {row['stands']} | {row['lines']} |" in (SAMPLE / "cover.md").read_text()


def test_an_export_writes_it(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if not pytestconfig.getoption("as_a_user"):
        pytest.skip("takes minutes: --as-a-user")
    door = str(ROOT / "bin/xpustack")
    to = tmp_path / "export"
    for words in (
        ["check", RELEASE, STEP],
        ["export", RELEASE, STEP, "--to", str(to), "--author", AUTHOR],
    ):
        subprocess.run([door, *words], check=True)
    text = (to / f"pull-requests/{STEP}.md").read_text()
    assert text.partition(RULE)[0] == (SAMPLE / f"{STEP}.md").read_text()
    assert (to / "cover.md").read_text() == (SAMPLE / "cover.md").read_text()
