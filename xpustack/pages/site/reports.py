# SPDX-License-Identifier: Apache-2.0
"""The site's pages of what was run: reports of devices, and kinds of checkpoints."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xpustack.core.project import Project
from xpustack.core.rows import read_rows
from xpustack.pages.site.charts import Bar, bars
from xpustack.pages.site.tables import Page, state, table

DEVICES = "docs/devices"
CHECKPOINTS = "docs/data/checkpoints.csv"
_STAGES = ("prove", "compare", "tune", "serve")
_STATES = {"serves": "fixed", "refuses": "absent", "wrong": "broken"}


def report_pages(project: Project) -> list[str]:
    """The devices' own pages, as names without an ending."""
    pages = sorted((project.root / DEVICES).glob("*/report.md"))
    return [str(path.relative_to(project.root).with_suffix("")) for path in pages]


def devices_page(project: Project) -> Page | None:
    """Every report that somebody sent: a row for each, and decode's times as bars. None
    if there is no report."""
    reports = [
        _report(path) for path in sorted((project.root / DEVICES).glob("*/*.json"))
    ]
    if not reports:
        return None
    rows = []
    for name, report in reports:
        stages = {stage["stage"]: stage for stage in report["stages"]}
        device = html.escape(report["device"])
        rows.append(
            [
                f'<a href="{DEVICES}/{name}/report.html">{device}</a>',
                html.escape(report["kind"]),
                html.escape(report["time"]),
                html.escape(report["release"]),
                *(_stage(stages.get(stage)) for stage in _STAGES),
            ]
        )
    intel = sum(report["kind"] == "xpu" for _, report in reports)
    parts = [
        "# Devices",
        "What `tox -e device` found on each device. Reports of Intel GPUs:"
        f" **{intel}**. [How to make yours](docs/devices.md).",
        table("device-rows", ("device", "kind", "time", "release", *_STAGES), rows),
    ]
    for name, report in reports:
        if chart := _decode_chart(report):
            parts += [f"## {report['device']}: decode", chart]
        parts.append(f"[All of this report]({DEVICES}/{name}/report.md)")
    return "\n\n".join(parts) + "\n", {}


def checkpoints_page(project: Project) -> Page | None:
    """Which release serves which kind of checkpoint. None without the record."""
    rows = read_rows(project.root / CHECKPOINTS)
    if not rows:
        return None
    kinds = dict.fromkeys(row["what"] for row in rows)
    cells = {(row["release"], row["what"]): row for row in rows}
    releases = dict.fromkeys(row["release"] for row in rows)
    grid = [
        [release, *(_verdict(cells.get((release, kind))) for kind in kinds)]
        for release in releases
    ]
    each = [
        [html.escape(row[key]) for key in ("release", "what", "verdict", "why")]
        for row in rows
    ]
    text = "\n\n".join(
        [
            "# Checkpoints by release",
            "Each verdict comes from a run: a tiny checkpoint of that kind through the"
            " engine on the emulated XPU. `serves`: it agrees with its float32 twin."
            " `refuses`: it ends with a message. `not run`: no verdict yet."
            " Point at a cell for what was found. All rows:"
            f" [CSV]({CHECKPOINTS}).",
            table("checkpoints-grid", ("release", *kinds), grid),
            "## What was found",
            table("checkpoint-rows", ("release", "checkpoint", "verdict", "why"), each),
        ]
    )
    return text + "\n", {}


def _report(path: Path) -> tuple[str, dict[str, Any]]:
    """A report's folder and content."""
    return path.parent.name, json.loads(path.read_text("utf-8"))


def _stage(stage: Mapping[str, Any] | None) -> str:
    if stage is None:
        return "not run"
    return html.escape(f"{stage['status']}: {stage['summary']}")


def _decode_chart(report: Mapping[str, Any]) -> str:
    """Decode's times in a graph, ours beside the fastest of the others; empty without
    figures."""
    rows: Sequence[Mapping[str, Any]] = ()
    for stage in report["stages"]:
        if stage["stage"] == "compare" and "benchmark" in stage["data"]:
            rows = stage["data"]["benchmark"]["rows"]
    chart = [
        Bar(
            f"{_tokens(row['tokens'])}, {row['heads']} heads: {row['candidate']}",
            best,
            int(row["candidate"] == "ours"),
        )
        for row in rows
        if row["op"] == "decode" and (best := row["captured"] or row["direct"])
    ]
    title = f"Decode on {report['device']}"
    return bars(title, "microseconds", chart[:40], ("others", "ours")) if chart else ""


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _verdict(row: Mapping[str, str] | None) -> str:
    if row is None:
        return state("unknown", "not run")
    verdict = row["verdict"]
    return state(_STATES.get(verdict, "unknown"), verdict, note=row["why"])
