# SPDX-License-Identifier: Apache-2.0
"""The site's own pages: steps, defects, machine code and measurements as data.

Each function gives the text of a page in Markdown with HTML tables, and the files with
the raw rows that the page links.
"""

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from xpustack.base.releases import Releases
from xpustack.core.project import Project
from xpustack.pages.defects import DATA, LIST, Defect, defects
from xpustack.pages.site.charts import Bar, bars
from xpustack.pages.status import StepStatus, matrix

KERNELS = "docs/kernels.md"
BENCHMARK = "docs/benchmark.json"
BRANCHES = "docs/data/xpu_branches.csv"
_DEVICE = "bmg"
_DEVICES = ("pvc", "bmg", "lnl", "ptl")
_SECTION = re.compile(r"^#### (.+)$")

Page = tuple[str, dict[str, str]]
"""A page's text, and the text of each further file by name."""


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
            "# Steps",
            "A number is how many lines the step changes and brings in that release;"
            " point at it for the subject. An empty cell: the release does not need"
            " the step, or cannot have it.",
            _table("steps-matrix", ["step", *names], rows),
            "## Each step of each release",
            "`checks` are those of the machine that made this page.",
            _table("step-rows", heads, each),
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
    figures = _read_csv(project.root / DATA)
    text = "\n\n".join(
        [
            "# Defects by release",
            "`fixed`: the published release is wrong, a step fixes it, and the step's"
            " test fails before and passes after. `no step`: point at it for the"
            " reason, such as fixed upstream. [Defects](docs/defects.md) says how the"
            " figures come about.",
            _table("defects-grid", ["id", "defect", "step", *pinned.names], rows),
            "## What the tests found",
            "Before the step and after it, in each release; click a long cell. All"
            " rows: [CSV](docs/data/defects.csv).",
            _rows_table("defects-figures", figures),
        ]
    )
    return text + "\n", {}


def branches_page(project: Project) -> Page:
    """Every line of two releases that names XPU, with its verdict."""
    text = "\n\n".join(
        [
            "# XPU branches",
            "Each line of v0.23.0 and v0.33.0 that names XPU, and what was found there."
            " [How it was read](docs/xpu_branches.md); all rows:"
            " [CSV](docs/data/xpu_branches.csv).",
            _rows_table("xpu-branches", _read_csv(project.root / BRANCHES)),
        ]
    )
    return text + "\n", {}


def machine_code_page(project: Project) -> Page:
    """Loop cost and spill of every compiled kernel, as charts and as raw rows."""
    groups = compiled_kernels(project.root / KERNELS)
    rows = [row for rows in groups.values() for row in rows]
    newest = [name for name in groups if name.startswith("Upstream")][-1:]
    shown = [*newest, "This stack"]
    parts = [
        "# Machine code",
        "Counted in the output of Intel's compiler for Battlemage; no device ran it."
        f" All rows: [CSV](machine_code.csv). How they are made: [Kernels]({KERNELS}).",
    ]
    for title, key, unit in (
        ("Instructions of one turn of the longest loop", "loop", "instructions"),
        ("Spilled registers", "spill", "bytes per hardware thread"),
    ):
        chart = [
            Bar(f"{row['op']}: {row['calls']}"[:44], value, number)
            for number, group in enumerate(shown)
            for row in groups.get(group, ())
            if (value := _on_device(row[key])) is not None and value > 0
        ]
        chart.sort(key=lambda bar: -bar.value)
        parts += [f"## {title}", bars(title, unit, chart[:40], shown)]
    heads = ("by", "op", "calls", "kernel", "spill", "loop", "instructions")
    parts += [
        "## All kernels",
        f"Four figures are those of {', '.join(_DEVICES)}; one is that of all.",
        _table(
            "machine-code-rows",
            heads,
            ([html.escape(row.get(head, "")) for head in heads] for row in rows),
        ),
    ]
    return "\n\n".join(parts) + "\n", {"machine_code.csv": _csv(rows)}


def measurements_page(project: Project) -> Page:
    """The benchmark's plot and rows."""
    report = json.loads((project.root / BENCHMARK).read_text("utf-8"))
    environment = report["environment"]
    rows = report["rows"]
    heads = (
        "op",
        "tokens",
        "heads",
        "keys",
        "candidate",
        "captured",
        "speedup_of_ours",
    )
    text = "\n\n".join(
        [
            "# Measurements",
            f"On one {environment['device']}, torch {environment['torch']}, Triton"
            f" {environment['triton']}, {environment['time']}. **No Intel GPU.** Times"
            " are microseconds of a captured graph. All rows: [CSV](benchmark.csv).",
            "![Time against the roof](docs/benchmark.svg)",
            _table(
                "measurement-rows",
                heads,
                ([_number(row[k]) for k in heads] for row in rows),
            ),
        ]
    )
    return text + "\n", {"benchmark.csv": _csv(rows)}


def compiled_kernels(page: Path) -> dict[str, list[dict[str, str]]]:
    """The rows of the tables of compiled kernels on a page, by their headings."""
    groups: dict[str, list[dict[str, str]]] = {}
    name = ""
    heads: list[str] = []
    for line in page.read_text("utf-8").splitlines():
        if found := _SECTION.match(line):
            name, heads = found[1].partition(",")[0], []
        elif line.startswith("| op | kernel |"):
            heads = _cells(line)
        elif heads and line.startswith("| "):
            row = dict(zip(heads, _cells(line), strict=False))
            groups.setdefault(name, []).append({"by": name, **row})
        elif not line.startswith("|"):
            heads = []
    return groups


def _state(defect: Defect, release: str, has: set[tuple[str, str]]) -> str:
    reason = defect.elsewhere.get(release)
    if reason is None and (release, defect.step) in has:
        return '<span class="fixed">fixed</span>'
    title = html.escape(reason or "no reason recorded")
    return f'<span class="none" title="{title}">no step</span>'


def _table(name: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table that the reader's browser can sort and filter. Cells are HTML."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    lines = ["<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows]
    return "\n".join(
        [
            f'<table id="{name}" class="data">',
            f"<thead><tr>{head}</tr></thead>",
            "<tbody>",
            *lines,
            "</tbody>",
            "</table>",
        ]
    )


def _rows_table(name: str, rows: Sequence[dict[str, str]]) -> str:
    """A table of rows whose cells are Markdown with code alone."""
    heads = list(rows[0]) if rows else []
    return _table(name, heads, ([_inline(row[head]) for head in heads] for row in rows))


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _read_csv(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _on_device(cell: str) -> float | None:
    """The figure of the charts' device in `a / b / c / d`, or the one for all."""
    figures = [part.strip() for part in cell.split("/")]
    text = figures[_DEVICES.index(_DEVICE)] if len(figures) > 1 else figures[0]
    return float(text) if text.isdigit() else None


def _cells(line: str) -> list[str]:
    parts = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [part.strip().replace(r"\|", "|").replace("`", "") for part in parts]


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else html.escape(str(value))


def _csv(rows: Sequence[dict[str, str]]) -> str:
    stream = io.StringIO()
    heads = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(stream, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
