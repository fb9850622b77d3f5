# SPDX-License-Identifier: Apache-2.0
"""The site's data: what charts and tables are made of. `tests/site` tests the pages."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from benchmarks.plot import picture_text
from xpustack.base.releases import load
from xpustack.core.cache import Cache
from xpustack.core.errors import EnvironmentProblem
from xpustack.core.project import Project
from xpustack.core.rows import csv_text, read_rows
from xpustack.pages.defects import Defect
from xpustack.pages.parts import ELSEWHERE, layer_steps
from xpustack.pages.site import build, generated, plots, reports
from xpustack.pages.site.charts import Bar, bars, path_charts
from xpustack.pages.status import StepStatus, step_statuses

ROOT = Path(__file__).parents[3]


def test_each_row_of_machine_code_is_shown(real_project: Project):
    rows = read_rows(real_project.root / generated.KERNELS)
    assert len(rows) > 400
    assert {"op", "kernel", "calls", "device", "spill", "loop"} <= set(rows[0])
    ours = [row for row in rows if row["by"] == "This stack"]
    assert ours and all(row["spill"] == "0" for row in ours)
    modelled = read_rows(real_project.root / generated.MODEL)
    text, files = generated.machine_code_page(real_project)
    assert text.count("<svg") == 2 and files == {}
    assert (
        "charts show Battlemage (`bmg`)" in text and ": `pvc`, `lnl`, `ptl`. " in text
    )
    assert "longest loop, bmg" in text and "registers, bmg" in text
    # Two tables, each with a line of heads.
    assert text.count("<tr>") == len(rows) + len(modelled) + 2


def test_rows_keep_commas_and_lines(tmp_path: Path):
    rows = [{"a": "1, 2", "b": 'say "x"'}, {"a": "", "c": "two\nlines"}]
    path = tmp_path / "rows.csv"
    path.write_text(csv_text(rows))
    heads = ("a", "b", "c")
    assert read_rows(path) == [{h: row.get(h, "") for h in heads} for row in rows]
    assert read_rows(tmp_path / "none.csv") == []


def test_a_cell_of_the_matrix_shows_state_age_and_size():
    step = StepStatus("v1.0", 1, "a-step", "Do <it>", 12, 3, "Backport [x/y#1]")
    rows = [
        structs.replace(step, checks="green", age=3),
        structs.replace(step, release="v2.0", checks="not lint, test", age=40),
        structs.replace(step, release="v3.0", checks="does not apply"),
        structs.replace(step, release="v4.0", checks="not build, lint, test"),
        structs.replace(step, release="v5.0"),
    ]
    names = [f"v{number}.0" for number in range(1, 7)]
    text, _ = generated.steps_page(rows, names)
    legend, _, rest = text.partition('<table id="steps-matrix"')
    assert '<span class="state green">green</span>' in legend and "(3)" in legend
    [row] = [line for line in rest.splitlines() if "<td><code>a-step" in line][:1]
    cells = row.split("<td ")[1:]
    shown = [re.sub("<[^>]*>", "", cell.partition(">")[2]) for cell in cells]
    size = "Backport, 12 + 3 lines"
    assert shown == [
        f"green · 3 d {size}",
        f"lint, test not checked here · 40 d {size}",
        f"does not apply · new {size}",
        f"not checked here · new {size}",
        f"not checked here · new {size}",
        "",
    ]
    kinds = [re.findall('class="state ([a-z]+)"', cell) for cell in cells]
    assert kinds == [["green"], ["unknown"], ["broken"], ["unknown"], ["unknown"], []]
    assert 'title="Do &lt;it&gt;: 12 lines changed, 3 new; Backport' in cells[0]
    orders = [int(re.findall('data-order="n([0-9]+)"', cell)[0]) for cell in cells]
    by_order = sorted(range(6), key=orders.__getitem__)
    assert by_order == [2, 3, 4, 1, 0, 5], "what is broken comes first, no step last"


def test_the_grid_of_defects_follows_series_and_list(
    real_project: Project, monkeypatch: pytest.MonkeyPatch
):
    pinned = load(real_project)
    names = pinned.names
    reasons = {
        names[0]: "not fixed: <CUDA> has it too",
        names[1]: "fixed upstream",
        names[2]: "one launch, by `other-step`",
        names[3]: "no such feature: by `no-such-step`",
    }
    listed = [Defect("N1", "it breaks", "a-step", elsewhere=reasons)]
    monkeypatch.setattr(generated, "defects", lambda project: listed)
    statuses = [
        StepStatus(name, 1, slug, "subject", 1, 0, "Pending")
        for name, slug in ((names[2], "other-step"), (names[4], "a-step"))
    ]
    text, _ = generated.defects_page(real_project, pinned, statuses)
    legend, _, grid = text.partition("</table>")[0].partition("<table")
    kinds = ["broken", "fixed", "absent"]
    assert re.findall('class="state ([a-z]+)"', legend) == kinds
    [row] = [line for line in grid.splitlines() if "<td>N1</td>" in line]
    cells = row.split("<td ")[1:]
    found = [re.findall(r'class="state ([a-z]+)">([a-z]+)<', cell) for cell in cells]
    wanted = ["broken", "absent", "fixed", "absent", "fixed"]
    wanted += ["broken"] * (len(names) - 5)
    assert found == [[(kind, kind)] for kind in wanted]
    assert "</summary> not fixed: &lt;CUDA&gt; has it too<" in cells[0]
    assert "</summary> one launch, by other-step<" in cells[2]
    assert "details" not in cells[4]
    assert "no reason recorded" in cells[5]


def test_each_real_cell_of_the_grid_has_one_of_three_states(real_project: Project):
    pinned = load(real_project)
    statuses = step_statuses(real_project, pinned)
    text, _ = generated.defects_page(real_project, pinned, statuses)
    rows = [
        line for line in text.partition("</table>")[0].splitlines() if "<td>" in line
    ]
    cells = [cell for row in rows for cell in row.split("<td ")[1:]]
    assert len(cells) == len(rows) * len(pinned.names) > 100
    kinds = [re.findall('class="state ([a-z]+)"', cell) for cell in cells]
    assert {kind for [kind] in kinds} == {"broken", "fixed", "absent"}
    assert "no reason recorded" not in text


def test_devices_and_checkpoints_have_a_page_if_there_are_records(tmp_path: Path):
    project = Project(tmp_path)
    assert reports.devices_page(project) is reports.checkpoints_page(project) is None
    folder = tmp_path / reports.DEVICES / "some-gpu"
    folder.mkdir(parents=True)
    row = {"op": "decode", "tokens": 1, "heads": 64, "captured": None, "direct": 9.5}
    rows = [{**row, "candidate": name} for name in ("ours", "torch")]
    benchmark = {"benchmark": {"rows": rows}}
    stage = {"stage": "compare", "status": "passed", "summary": "2 figures"}
    report = {"device": "A <GPU>", "kind": "xpu", "time": "today", "release": "v1.0"}
    report["stages"] = [{**stage, "data": benchmark}]
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "report.md").write_text("# A GPU\n")
    text, _ = reports.devices_page(project) or ("", {})
    assert "A &lt;GPU&gt;" in text and "passed: 2 figures" in text and "<svg" in text
    assert "1 token, 64 heads: ours" in text
    assert "Intel GPUs: **1**" in text and text.count("not run") == 3
    assert reports.report_pages(project) == ["docs/devices/some-gpu/report"]
    record = tmp_path / reports.CHECKPOINTS
    record.parent.mkdir(parents=True)
    record.write_text(
        "release,checkpoint,what,verdict,why\nv2.0,a,A,serves,0.1 %\n"
        "v2.0,b,B,refuses,no <B>\nv1.0,a,A,wrong,7 %\n"
    )
    text, _ = reports.checkpoints_page(project) or ("", {})
    grid = text.partition("</table>")[0]
    assert '<span class="state fixed">serves</span></summary> 0.1 %' in grid
    assert '<span class="state absent">refuses</span></summary> no &lt;B&gt;' in grid
    assert '<span class="state broken">wrong</span></summary> 7 %' in grid
    assert '<span class="state unknown">not run</span>' in grid


def test_every_step_stands_in_one_part_of_the_layer(real_project: Project):
    slugs = {status.step for status in step_statuses(real_project, load(real_project))}
    parts = layer_steps(slugs)
    shown = [slug for _, _, steps in parts for slug in steps]
    assert sorted(shown) == sorted(slugs)
    assert layer_steps(["new-step"])[-1] == (ELSEWHERE, parts[-1][1], ["new-step"])


def test_a_chart_names_its_bars_and_its_unit():
    text = bars("Cost <of> it", "ms", [Bar("a & b", 3), Bar("c", 6, 1)], ("x", "y"))
    assert "Cost &lt;of&gt; it" in text and "a &amp; b" in text and ">ms<" in text
    assert text.count("<rect") == 4


def test_charts_of_the_xpu_path_have_every_case(real_project: Project):
    rows = read_rows(real_project.root / "docs/data/xpu_path.csv")
    text = path_charts(rows)
    patched = [
        row for row in rows if (row["tree"], row["part"]) == ("patched", "attention")
    ]
    assert len(patched) > 20
    assert text.count(": untouched<") == text.count("times as fast<") == len(patched)
    assert text.count("<svg") == 3
    pair = {
        "release": "v1.0",
        "kind": "decode",
        "batch": "16",
        "tokens": "1024",
        "part": "attention",
    }
    rows = [
        {**pair, "tree": "untouched", "microseconds": "30.0"},
        {**pair, "tree": "patched", "microseconds": "12.0"},
        {**pair, "batch": "64", "tree": "untouched", "microseconds": "9.0"},
    ]
    text = path_charts(rows)
    assert "16 at 1,024 tokens: untouched<" in text
    assert "patched, 2.5 times as fast<" in text and "64 at" not in text


def test_a_plot_has_a_point_for_each_figure_that_counts():
    row = {"op": "decode", "heads": "64", "keys": "1152", "% of the roof": "40"}
    row |= {"candidate": "ours", "graph": "", "direct": "9.5", "note": ""}
    rows = [
        {**row, "tokens": "128", "graph": "20.5"},
        {**row, "tokens": "1"},
        {**row, "tokens": "1", "candidate": "a <b>", "note": "WRONG: by 9 %"},
        {**row, "tokens": "1", "op": "insert", "keys": ""},
    ]
    [panel] = plots.panels(rows)
    assert panel.title == "decode, 64 heads, 1,152 keys"
    points = [plots.Point(1, 9.5, 40), plots.Point(128, 20.5, 40)]
    assert panel.lines == {"ours": points}
    text = plots.plot("Time", [panel])
    assert text.count("<circle") == 4 and text.count("<polyline") == 2
    assert "ours, 128 tokens: 20.5 µs, 40 % of the roof" in text
    assert plots.plot("Time", plots.panels([])) == ""


def test_newer_rows_of_an_op_replace_the_older_ones(tmp_path: Path):
    (tmp_path / "docs/data").mkdir(parents=True)
    old = [{"op": "decode", "graph": "9"}, {"op": "insert", "graph": "3"}]
    (tmp_path / plots.BENCHMARK).write_text(csv_text(old))
    assert plots.newest_rows(tmp_path) == old
    new = [{"op": "decode", "graph": "7"}, {"op": "prefill", "graph": "8"}]
    (tmp_path / plots.ATTENTION).write_text(csv_text(new))
    assert plots.newest_rows(tmp_path) == [*new, old[1]]


def test_the_measurements_show_the_newest_run_of_attention(real_project: Project):
    text, _ = generated.measurements_page(real_project)
    attention, _, others = text.partition("## Other kernels")
    rows = read_rows(real_project.root / plots.ATTENTION)
    assert attention.count("<tr>") == len(rows) + 1
    assert ">decode, 64 heads" in attention and ">decode, 64 heads" not in others
    assert ">insert, 64 heads" in others and ">insert, 64 heads" not in attention


def test_the_picture_shows_the_rows_that_are_there(real_project: Project):
    root = real_project.root
    text = (root / "docs/benchmark.svg").read_text("utf-8")
    assert text == picture_text(root), "python -m benchmarks.plot --redraw"


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
        assert job["env"]["GIT_CONFIG_KEY_0"] == "safe.directory"
        text = str(job["steps"])
        assert " chromium chromium-driver " in text and "'fetch-depth': 0" in text


def test_without_sphinx_the_next_command_is_named(
    real_project: Project, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "sphinx.application", None)
    with pytest.raises(EnvironmentProblem, match="the site needs") as caught:
        build.build_site(real_project, Cache(tmp_path / "cache"), tmp_path / "site")
    assert caught.value.hint == "tox -e site"
    assert not (tmp_path / "site").exists()
