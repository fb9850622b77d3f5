# SPDX-License-Identifier: Apache-2.0
"""The site's data: what charts and tables are made of. `tests/site` tests the pages."""

import json
import sys
from pathlib import Path

import pytest

from xpustack.base.releases import load
from xpustack.core.cache import Cache
from xpustack.core.errors import EnvironmentProblem
from xpustack.core.project import Project
from xpustack.core.rows import csv_text, read_rows
from xpustack.pages.parts import ELSEWHERE, layer_steps
from xpustack.pages.site import build, generated, reports
from xpustack.pages.site.charts import Bar, bars
from xpustack.pages.status import step_statuses


def test_each_row_of_machine_code_is_shown(real_project: Project):
    rows = read_rows(real_project.root / generated.KERNELS)
    assert len(rows) > 400
    assert {"op", "kernel", "calls", "device", "spill", "loop"} <= set(rows[0])
    ours = [row for row in rows if row["by"] == "This stack"]
    assert ours and all(row["spill"] == "0" for row in ours)
    modelled = read_rows(real_project.root / generated.MODEL)
    text, files = generated.machine_code_page(real_project)
    assert text.count("<svg") == 2 and files == {}
    # Two tables, each with a line of heads.
    assert text.count("<tr>") == len(rows) + len(modelled) + 2


def test_rows_keep_commas_and_lines(tmp_path: Path):
    rows = [{"a": "1, 2", "b": 'say "x"'}, {"a": "", "c": "two\nlines"}]
    path = tmp_path / "rows.csv"
    path.write_text(csv_text(rows))
    heads = ("a", "b", "c")
    assert read_rows(path) == [{h: row.get(h, "") for h in heads} for row in rows]
    assert read_rows(tmp_path / "none.csv") == []


def test_the_grid_of_defects_follows_series_and_list(real_project: Project):
    pinned = load(real_project)
    statuses = step_statuses(real_project, pinned)
    text, _ = generated.defects_page(real_project, pinned, statuses)
    grid = text.partition("</table>")[0]
    [row] = [line for line in grid.splitlines() if "<td>N2</td>" in line]
    cells = row.split("<td>")[4:]
    by_release = dict(zip(pinned.names, cells, strict=True))
    assert "fixed upstream" in by_release["v0.26.0"]
    assert 'class="fixed"' in by_release["v0.33.0"]


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
    assert '<span class="fixed" title="0.1 %">serves</span>' in grid
    assert 'title="no &lt;B&gt;">refuses' in grid and "not run" in grid
    assert '<span class="wrong" title="7 %">wrong</span>' in grid


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


def test_without_sphinx_the_next_command_is_named(
    real_project: Project, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "sphinx.application", None)
    with pytest.raises(EnvironmentProblem, match="the site needs") as caught:
        build.build_site(real_project, Cache(tmp_path / "cache"), tmp_path / "site")
    assert caught.value.hint == "tox -e site"
    assert not (tmp_path / "site").exists()
