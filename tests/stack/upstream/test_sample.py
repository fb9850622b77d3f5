# SPDX-License-Identifier: Apache-2.0
"""`docs/sample` is what an export of one step writes, without upstream's checklist.

    xpustack export v0.33.0 cpu-tile-scheduler --author 'A Person <person@localhost>'

makes it anew, with the `--packages DIR` that it asks for; `--as-a-user` compares, which
takes minutes.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from stack.core.project import Project
from stack.core.rows import read_rows
from stack.series.order import read_patches
from stack.upstream.request_tests import read_request_tests
from stack.upstream.vllm_tests import PACKAGES

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


def test_its_tests_are_those_of_the_request() -> None:
    tests = read_request_tests(Project(ROOT), STEP)
    assert tests is not None
    text = (SAMPLE / f"{STEP}.md").read_text()
    assert all(f"new or changed in `{name}`" in text for name in tests.modules)
    added = tests.diff.count(b"\n+def test_")
    assert added and f"{added} passed, {added} of them failed before" in text


def test_its_cover_has_the_figures_of_the_rows() -> None:
    [row] = [
        row
        for row in read_rows(ROOT / "docs/data/requests.csv")
        if (row["release"], row["step"]) == (RELEASE, STEP)
    ]
    assert f"| {row['stands']} | {row['lines']} |" in (SAMPLE / "cover.md").read_text()


def test_an_export_writes_it(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if not pytestconfig.getoption("as_a_user"):
        pytest.skip("takes minutes: --as-a-user")
    door, packages = str(ROOT / "bin/xpustack"), str(tmp_path / "packages")
    to = tmp_path / "export"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", packages]
    subprocess.run([*pip, *PACKAGES], check=True)
    export = ["export", RELEASE, STEP, "--to", str(to), "--author", AUTHOR]
    for words in (["check", RELEASE, STEP], [*export, "--packages", packages]):
        subprocess.run([door, *words], check=True)
    text = (to / f"pull-requests/{STEP}.md").read_text()
    assert text.partition(RULE)[0] == (SAMPLE / f"{STEP}.md").read_text()
    assert (to / "cover.md").read_text() == (SAMPLE / "cover.md").read_text()
