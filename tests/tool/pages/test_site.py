# SPDX-License-Identifier: Apache-2.0
"""The site's data: what charts and tables are made of. The pages themselves are tested
by `tox -e site`, which has Sphinx and a browser."""

import csv
import io
import sys

import pytest

from xpustack.base.releases import load
from xpustack.core.cache import Cache
from xpustack.core.errors import EnvironmentProblem
from xpustack.core.project import Project
from xpustack.pages.site import build, generated
from xpustack.pages.site.charts import Bar, bars
from xpustack.pages.site.layer import ELSEWHERE, layer_steps
from xpustack.pages.status import step_statuses


def test_each_compiled_kernel_of_the_page_is_a_row(real_project: Project):
    page = real_project.root / generated.KERNELS
    groups = generated.compiled_kernels(page)
    assert "This stack" in groups
    lines = page.read_text().count("\n| ")
    rows = [row for group in groups.values() for row in group]
    assert 100 < len(rows) < lines
    assert {"op", "kernel", "calls", "spill", "loop"} <= set(rows[0])
    ours = groups["This stack"]
    assert all(row["spill"] == "0" for row in ours)
    text, files = generated.machine_code_page(real_project)
    assert "<svg" in text and text.count("<tr>") == len(rows) + 1
    assert len(list(csv.DictReader(io.StringIO(files["machine_code.csv"])))) == len(
        rows
    )


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


def test_a_figure_for_four_devices_is_read_for_one():
    assert generated._on_device("12778 / 7813 / 7813 / 9") == 7813
    assert generated._on_device("0") == 0
    assert generated._on_device("does not compile") is None
    assert generated._on_device("") is None


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
