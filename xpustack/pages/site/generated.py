# SPDX-License-Identifier: Apache-2.0
"""The site's own pages: steps, defects, machine code and measurements as data.

Each function gives the text of a page in Markdown with HTML tables, and the files with
the raw rows that the page links.
"""

import html
from collections.abc import Sequence

from xpustack.base.releases import Releases
from xpustack.core.markdown import section
from xpustack.core.project import Project
from xpustack.core.rows import read_rows
from xpustack.pages.defects import DATA, LIST, Defect, defects
from xpustack.pages.site.charts import Bar, bars
from xpustack.pages.site.tables import Page, columns_table, rows_table, table
from xpustack.pages.status import DATA as STEPS
from xpustack.pages.status import StepStatus, matrix

KERNELS = "docs/data/machine_code.csv"
MODEL = "docs/data/cost_model.csv"
BENCHMARK = "docs/data/benchmark.csv"
ATTENTION = "docs/data/benchmark_attention.csv"
KERNELS_PAGE = "docs/kernels.md"
_DEVICE = "bmg"
_OURS = "This stack"


def steps_page(statuses: Sequence[StepStatus], names: Sequence[str]) -> Page:
    """The matrix of steps and releases, and a row for each step of each release."""
    rows = []
    for slug, row in matrix(statuses, names):
        cells = []
        for status in row:
            if status is None:
                cells.append("")
                continue
            size = f"{status.changed + status.brought}"
            title = f"{status.subject}: {status.changed} lines changed"
            title += f", {status.brought} new; {status.upstream}"
            title += "" if status.age is None else f"; {status.age} days old"
            cells.append(f'<span title="{html.escape(title)}">{size}</span>')
        rows.append([f"<code>{slug}</code>", *cells])
    each = [
        (
            f"<code>{status.step}</code>",
            status.release,
            html.escape(status.subject),
            status.changed,
            status.brought,
            html.escape(status.upstream),
            status.checks or "unknown",
            "" if status.age is None else status.age,
            html.escape(status.removal),
        )
        for status in statuses
    ]
    heads = (
        "step",
        "release",
        "subject",
        "lines",
        "new",
        "upstream",
        "checks",
        "days",
        "dropped when",
    )
    text = "\n\n".join(
        [
            "# Steps by release",
            "A number is how many lines the step changes and brings in that release;"
            " point at it for the subject. An empty cell: the release does not need"
            " the step, or cannot have it. [How to read a row](docs/steps.md); all"
            f" rows: [CSV]({STEPS}).",
            table("steps-matrix", ["step", *names], rows),
            "## Each step of each release",
            "`checks` are those of the machine that made this page.",
            table("step-rows", heads, each),
        ]
    )
    return text + "\n", {}


def defects_page(
    project: Project, pinned: Releases, statuses: Sequence[StepStatus]
) -> Page:
    """The grid of defects and releases: fixed by a step, or why there is none."""
    listed = defects(project) if (project.root / LIST).is_file() else ()
    has = {(status.release, status.step) for status in statuses}
    rows = []
    for defect in listed:
        cells = [_state(defect, name, has) for name in pinned.names]
        step = f"<code>{html.escape(defect.step)}</code>"
        rows.append([defect.id, html.escape(defect.what), step, *cells])
    figures = read_rows(project.root / DATA)
    text = "\n\n".join(
        [
            "# Defects by release",
            "`fixed`: the published release is wrong, a step fixes it, and the step's"
            " test fails before and passes after. `no step`: point at it for the"
            " reason, such as fixed upstream. [Defects](docs/defects.md) says how the"
            " figures come about.",
            table("defects-grid", ["id", "defect", "step", *pinned.names], rows),
            "## What the tests found",
            "Before the step and after it, in each release; click a long cell. All"
            " rows: [CSV](docs/data/defects.csv).",
            rows_table("defects-figures", figures),
        ]
    )
    return text + "\n", {}


def machine_code_page(project: Project) -> Page:
    """Loop cost and spill of every compiled kernel, as charts and as raw rows."""
    rows = read_rows(project.root / KERNELS)
    newest = [
        name
        for name in dict.fromkeys(row["by"] for row in rows)
        if name.startswith("Upstream")
    ][-1:]
    shown = [*newest, _OURS]
    parts = [
        "# Machine code",
        "Counted in the output of Intel's compiler for Battlemage; no device ran it."
        f" All rows, of each device: [CSV]({KERNELS}). How they are made:"
        " [Kernels](docs/kernels.md).",
    ]
    for title, key, unit in (
        ("Instructions of one iteration of the longest loop", "loop", "instructions"),
        ("Spilled registers", "spill", "bytes per hardware thread"),
    ):
        chart = [
            Bar(f"{row['op']}: {row['calls']}"[:44], value, shown.index(row["by"]))
            for row in rows
            if row["by"] in shown
            and row["device"] == _DEVICE
            and (value := float(row[key])) > 0
        ]
        chart.sort(key=lambda bar: -bar.value)
        parts += [f"## {title}", bars(title, unit, chart[:40], shown)]
    heads = ("by", "op", "calls", "kernel", "device", "spill", "loop", "instructions")
    parts += [
        "## All kernels",
        "Bytes of spill per hardware thread, instructions of the longest loop, and all"
        " instructions.",
        columns_table("machine-code-rows", heads, rows),
        "## What it should cost",
        "**Modelled, not measured**, from that machine code and each device's data"
        " sheet. T: tokens, H: heads, K: keys. `times the memory roof`: beside moving"
        " queries, keys and results alone at the full rate of DRAM. `upstream takes`:"
        f" times as long. All rows: [CSV]({MODEL}).",
        rows_table("cost-model", read_rows(project.root / MODEL)),
    ]
    return "\n\n".join(parts) + "\n", {}


def measurements_page(project: Project) -> Page:
    """The benchmark's plot and rows."""
    measured = section(project.root / KERNELS_PAGE, "benchmark").partition(". The ")[0]
    text = "\n\n".join(
        [
            "# Measurements",
            f"{measured}. **No Intel GPU.** Times are microseconds; `graph` is a"
            " captured graph, whose figure counts, `direct` a call from Python."
            f" All rows: [CSV]({BENCHMARK}).",
            "![Time against the roof](docs/benchmark.svg)",
            rows_table("measurement-rows", read_rows(project.root / BENCHMARK)),
            "## Attention after its merge was changed",
            "Decode and prefill again, on the same kind of GPU"
            f" ([when and why]({KERNELS_PAGE})). All rows: [CSV]({ATTENTION}).",
            rows_table("attention-rows", read_rows(project.root / ATTENTION)),
        ]
    )
    return text + "\n", {}


def _state(defect: Defect, release: str, has: set[tuple[str, str]]) -> str:
    reason = defect.elsewhere.get(release)
    if reason is None and (release, defect.step) in has:
        return '<span class="fixed">fixed</span>'
    title = html.escape(reason or "no reason recorded")
    return f'<span class="none" title="{title}">no step</span>'
