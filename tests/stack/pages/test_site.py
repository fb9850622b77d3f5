# SPDX-License-Identifier: Apache-2.0
"""The site's data: what charts and tables are made of. `tests/site` tests the pages."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from stack.base.releases import load
from stack.core.cache import Cache
from stack.core.errors import EnvironmentProblem
from stack.core.project import Project
from stack.core.rows import csv_text, read_rows
from stack.pages.defects import Defect, verdict
from stack.pages.overview import overview
from stack.pages.site import build, charts
from stack.pages.status import ELSEWHERE, layer_steps, step_statuses

ROOT = Path(__file__).parents[3]


def test_rows_keep_commas_and_lines(tmp_path: Path):
    rows = [{"a": "1, 2", "b": 'say "x"'}, {"a": "", "c": "two\nlines"}]
    path = tmp_path / "rows.csv"
    path.write_text(csv_text(rows))
    heads = ("a", "b", "c")
    assert read_rows(path) == [{h: row.get(h, "") for h in heads} for row in rows]
    assert read_rows(tmp_path / "none.csv") == []


def test_each_file_of_rows_is_on_one_page():
    texts = [page.read_text("utf-8") for page in build.TABLES]
    shown = [file for text in texts for _, file in build.LINE.findall(text)]
    there = {path.name for path in (ROOT / build.FOLDER).glob("*.csv")}
    assert sorted(shown) == sorted(there)
    assert set(charts.CHARTS) <= there


def test_a_table_shows_text_and_code():
    text = build.table(("a", "<b>"), [["`x/y` & z", "two\n\nlines"]])
    assert "<th>&lt;b&gt;</th>" in text
    assert "<td><code>x/<wbr>y</code> &amp; z</td><td>two  lines</td>" in text


@pytest.mark.parametrize(
    ("release", "wanted"),
    [
        ("v1.0", "broken"),
        ("v2.0", "absent"),
        ("v3.0", "fixed"),
        ("v4.0", "absent"),
        ("v5.0", "fixed"),
        ("v6.0", "broken, without a reason"),
    ],
)
def test_a_verdict_follows_series_and_list(release: str, wanted: str):
    reasons = {
        "v1.0": "not fixed: CUDA has it too",
        "v2.0": "fixed upstream",
        "v3.0": "one launch, by `other-step`",
        "v4.0": "no such feature: by `no-such-step`",
    }
    defect = Defect("N1", "it breaks", "a-step", elsewhere=reasons)
    has = {("v3.0", "other-step"), ("v5.0", "a-step")}
    assert verdict(defect, release, has) == wanted


def test_each_real_defect_has_one_of_three_states(real_project: Project):
    pinned = load(real_project)
    statuses = step_statuses(real_project, pinned)
    grid = build.defects_grid(real_project, pinned.names, statuses)
    *rows, last = (
        row.removesuffix("</td></tr>").split("</td><td>")[3:]
        for row in grid.splitlines()[1:-1]
    )
    for cells in rows:
        assert len(cells) == len(pinned.names)
        assert set(cells) <= {"broken", "fixed", "absent"}
    readme = overview(real_project, pinned).splitlines()[2:]
    assert [row.split(" | ")[2] for row in readme] == last[::-1]


def test_every_step_stands_in_one_part_of_the_layer(real_project: Project):
    slugs = {status.step for status in step_statuses(real_project, load(real_project))}
    parts = layer_steps(slugs)
    shown = [slug for _, _, steps in parts for slug in steps]
    assert sorted(shown) == sorted(slugs)
    assert layer_steps(["new-step"])[-1] == (ELSEWHERE, parts[-1][1], ["new-step"])


@pytest.mark.parametrize("lines", [False, True])
def test_a_chart_is_a_file_that_loads_nothing(lines: bool):
    groups = {"x": {"16": 3.0, "1": 40.0}, "ours": {"1": 6.0}}
    chart = charts.Chart("Cost <of> it", "ms", lines, groups)
    parts = list(ElementTree.fromstring(chart.svg()).iter())
    words = {part.text for part in parts}
    assert {"Cost <of> it", "ms", "1", "16", "x", "ours"} <= words
    assert not any(name.endswith(("href", "src")) for p in parts for name in p.attrib)
    assert chart.labels() == (["1", "16"] if lines else ["16", "1"])


def test_machine_code_is_drawn_beside_the_newest_release(real_project: Project):
    rows = read_rows(real_project.root / "docs/data/machine_code.csv")
    newest = f"Upstream {load(real_project).names[-1]}"
    loops, spills = found = list(charts.machine_code(rows))
    assert set(loops.groups) == {newest, "This stack"}
    assert max(sum(map(len, chart.groups.values())) for chart in found) <= 20
    # This stack spills nowhere.
    assert set(spills.groups) == {newest}


def test_the_benchmark_has_a_point_for_each_figure_that_counts():
    row = {"op": "decode", "heads": "64", "keys": "1152", "candidate": "ours"}
    row |= {"graph": "", "direct": "9.5", "note": ""}
    rows = [
        {**row, "tokens": "128", "graph": "20.5"},
        {**row, "tokens": "1"},
        {**row, "tokens": "1", "candidate": "a <b>", "note": "WRONG: by 9 %"},
        {**row, "tokens": "1", "op": "insert", "keys": ""},
    ]
    [chart] = charts.benchmark(rows)
    assert chart.title == "decode attention, 64 heads, 1,152 keys"
    assert chart.groups == {"ours": {"1": 9.5, "128": 20.5}}


def test_workflows_build_the_site_with_a_browser_and_the_whole_history():
    jobs = [
        job
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
        if any("tox -e site" in step.get("run", "") for step in job["steps"])
    ]
    assert len(jobs) == 2
    for job in jobs:
        assert job["env"]["XPUSTACK_BROWSER"] == "required"
        assert " chromium chromium-driver " in str(job["steps"])


def test_without_sphinx_the_next_command_is_named(
    real_project: Project, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "sphinx.application", None)
    with pytest.raises(EnvironmentProblem, match="the site needs") as caught:
        build.build_site(real_project, Cache(tmp_path / "cache"), tmp_path / "site")
    assert caught.value.hint == "tox -e site"
    assert not (tmp_path / "site").exists()
