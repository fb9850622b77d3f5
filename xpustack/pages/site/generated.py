# SPDX-License-Identifier: Apache-2.0
"""The site's own pages: steps, defects, machine code and measurements as data.

Each function gives the text of a page in Markdown with HTML tables, and the files with
the raw rows that the page links.
"""

import html
import re
from collections.abc import Iterable, Sequence

from xpustack.base.releases import Releases
from xpustack.core.markdown import section
from xpustack.core.project import Project
from xpustack.core.rows import read_rows
from xpustack.pages.defects import DATA, LIST, Defect, defects
from xpustack.pages.site.charts import Bar, bars
from xpustack.pages.site.plots import ATTENTION, BENCHMARK, panels, plot
from xpustack.pages.site.tables import (
    Cell,
    Page,
    columns_table,
    rows_table,
    state,
    table,
)
from xpustack.pages.status import DATA as STEPS
from xpustack.pages.status import StepStatus, matrix

KERNELS = "docs/data/machine_code.csv"
MODEL = "docs/data/cost_model.csv"
KERNELS_PAGE = "docs/kernels.md"
UNCHECKED = "not checked here"
_DEVICE = "bmg"
_OURS = "This stack"
_NOTHING = "not build, lint, test"
_STATES = ("broken", "absent", "unknown", "fixed", "green")
"""The classes of states, in the order in which they sort."""
_LABEL = 44
"""Letters beside a bar."""
_LONG = 100_000
"""More days than a step can be old."""
_BY_STEP = re.compile(r"\bby `([a-z0-9-]+)`$")
"""Another step of the series, in the reason why a series lacks a step."""


def steps_page(statuses: Sequence[StepStatus], names: Sequence[str]) -> Page:
    """The matrix of steps and releases, and a row for each step of each release."""
    rows = [
        [f"<code>{slug}</code>", *map(_step_cell, row)]
        for slug, row in matrix(statuses, names)
    ]
    each = [
        (
            f"<code>{status.step}</code>",
            status.release,
            html.escape(status.subject),
            status.changed,
            status.brought,
            html.escape(status.upstream),
            html.escape(_check_state(status)[1]),
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
    kinds = [_check_state(status)[0] for status in statuses]
    legend = (
        ("green", "green", "built, linted and tested here as it is now"),
        ("unknown", UNCHECKED, "no green result of it as it is now on this machine"),
        ("broken", "does not apply", "its patch no longer fits"),
    )
    text = "\n\n".join(
        [
            "# Steps by release",
            "In a cell: the state of the step's checks on the machine that made this"
            " page, the days since the step was first committed, its status upstream,"
            " and how many lines it changes and, after the +, brings. An empty cell:"
            " the release does not need the step, or cannot have it."
            " [How to read a row](docs/steps.md); all rows:"
            f" [CSV]({STEPS}).",
            _legend(
                (kind, text, f"{says} ({kinds.count(kind)})")
                for kind, text, says in legend
            ),
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
    """The grid of defects and releases: broken, fixed by a step, or absent."""
    listed = defects(project) if (project.root / LIST).is_file() else ()
    has = {(status.release, status.step) for status in statuses}
    rows = []
    for defect in listed:
        cells = [_defect_cell(defect, name, has) for name in pinned.names]
        step = f"<code>{html.escape(defect.step)}</code>"
        rows.append([defect.id, html.escape(defect.what), step, *cells])
    figures = read_rows(project.root / DATA)
    text = "\n\n".join(
        [
            "# Defects by release",
            "Each published release with this stack's patches. Click or touch a word"
            " with a triangle for the reason. [Defects](docs/defects.md) says how the"
            " figures come about.",
            _legend(
                (
                    ("broken", "broken", "the patched release still has the defect"),
                    (
                        "fixed",
                        "fixed",
                        "the published release has it, a step fixes it, and the step's"
                        " test fails before and passes after",
                    ),
                    (
                        "absent",
                        "absent",
                        "the release does not have it: fixed upstream, or no such"
                        " feature",
                    ),
                )
            ),
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
    devices = dict.fromkeys(row["device"] for row in rows)
    others = ", ".join(f"`{name}`" for name in devices if name not in ("", _DEVICE))
    parts = [
        "# Machine code",
        "Counted in the output of Intel's compiler; no device ran it. **The charts show"
        f" Battlemage (`{_DEVICE}`).** The table below them and the [CSV]({KERNELS})"
        f" have the other devices, too: {others}. How they are made:"
        " [Kernels](docs/kernels.md).",
    ]
    for title, key, unit in (
        ("Instructions of one iteration of the longest loop", "loop", "instructions"),
        ("Spilled registers", "spill", "bytes per hardware thread"),
    ):
        chart = [
            Bar(_label(row), value, shown.index(row["by"]))
            for row in rows
            if row["by"] in shown
            and row["device"] == _DEVICE
            and (value := float(row[key])) > 0
        ]
        chart.sort(key=lambda bar: -bar.value)
        title += f", {_DEVICE}"
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
    """Plots and rows of the benchmark: attention's newest run, and the other ops."""
    measured = section(project.root / KERNELS_PAGE, "benchmark").partition(". The ")[0]
    attention = read_rows(project.root / ATTENTION)
    again = {row["op"] for row in attention}
    others = [
        row for row in read_rows(project.root / BENCHMARK) if row["op"] not in again
    ]
    text = "\n\n".join(
        [
            "# Measurements",
            "**No Intel GPU: NVIDIA GPUs.** Times are microseconds; `graph` is a"
            " captured graph, whose figure counts, `direct` a call from Python, which"
            " stands in where nothing was captured. The roof is the larger of bytes"
            " over the measured copy bandwidth and operations over the measured rate of"
            " products. What was timed at one number of tokens is in the tables alone.",
            "## Attention",
            "The newest runs of decode, prefill and the compressor"
            f" ([when and on what]({KERNELS_PAGE})). All rows: [CSV]({ATTENTION}).",
            plot("Attention: time and per cent of the roof", panels(attention)),
            rows_table("attention-rows", attention),
            "## Other kernels",
            f"{measured}. All rows of that run: [CSV]({BENCHMARK}).",
            plot("Other kernels: time and per cent of the roof", panels(others)),
            rows_table("measurement-rows", others),
        ]
    )
    return text + "\n", {}


def _label(row: dict[str, str]) -> str:
    text = f"{row['op']}: {row['calls']}"
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…"


def _check_state(status: StepStatus) -> tuple[str, str]:
    """The class and the words of a step's checks."""
    checks = status.checks
    if checks is None or checks == _NOTHING:
        return "unknown", UNCHECKED
    if checks.startswith("not "):
        return "unknown", f"{checks.removeprefix('not ')} {UNCHECKED}"
    return ("green" if checks == "green" else "broken"), checks


def _step_cell(status: StepStatus | None) -> Cell:
    """A step in the matrix; cells sort by state, then by age."""
    if status is None:
        return Cell("", len(_STATES) * _LONG)
    kind, words = _check_state(status)
    age = "new" if status.age is None else f"{status.age} d"
    size = f"{status.changed}" + (f" + {status.brought}" if status.brought else "")
    title = f"{status.subject}: {status.changed} lines changed"
    title += f", {status.brought} new; {status.upstream}"
    upstream = html.escape(status.upstream.partition(" ")[0])
    text = state(kind, f"{words} · {age}", title=title)
    text += f" <small>{upstream}, {size} lines</small>"
    return Cell(text, _STATES.index(kind) * _LONG + (status.age or 0))


def _defect_cell(defect: Defect, release: str, has: set[tuple[str, str]]) -> Cell:
    """A defect in a release; cells sort by state."""
    reason = defect.elsewhere.get(release)
    own = (release, defect.step) in has
    if reason is None:
        kind, note = ("fixed", "") if own else ("broken", "no reason recorded")
    elif reason.startswith("not fixed"):
        kind, note = "broken", reason
    elif (other := _BY_STEP.search(reason)) and (release, other[1]) in has:
        kind, note = "fixed", reason
    else:
        kind, note = "absent", reason
    return Cell(state(kind, kind, note=note.replace("`", "")), _STATES.index(kind))


def _legend(states: Iterable[tuple[str, str, str]]) -> str:
    """What each state means: its class, its word and a sentence."""
    lines = [f"<li>{state(kind, text)} {says}</li>" for kind, text, says in states]
    return f'<ul class="legend">\n{chr(10).join(lines)}\n</ul>'
