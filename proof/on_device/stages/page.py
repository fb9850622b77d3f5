# SPDX-License-Identifier: Apache-2.0
"""`report.md`: the report for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from proof.on_device.stages.records import Report, StageResult
from stack.core.markdown import table


def text(report: Report) -> str:
    """The whole page."""
    lines = [
        f"# {report.device}",
        "",
        f"`xpustack device --device {report.kind}`, {report.time}, {report.tool},"
        f" beside the pins of {report.release}.",
        "",
        table(
            ("stage", "verdict", "seconds", "result"),
            ((s.stage, s.status, f"{s.seconds:.0f}", s.summary) for s in report.stages),
        ),
        "",
        "## The machine",
        "",
        table(
            ("", "found", "pinned"),
            ((f.name, f.found or "-", f.pinned or "-") for f in report.facts),
        ),
    ]
    writers = {
        "prove": _prove,
        "compare": _compare,
        "tune": _tune,
        "link": _link,
        "serve": _serve,
        "model": _model,
    }
    for result in report.stages:
        title = result.stage.capitalize()
        lines += ["", f"## {title}", "", f"{result.status}: {result.summary}."]
        lines += ["", *(f"- {finding}" for finding in result.findings)]
        if result.stage in writers:
            lines += writers[result.stage](result)
    return "\n".join(_single_blanks(lines)) + "\n"


def _single_blanks(lines: list[str]) -> Iterator[str]:
    last = ""
    for line in lines:
        if line or last:
            yield line
        last = line


def _prove(result: StageResult) -> Iterator[str]:
    rows = result.data.get("machine_code", [])
    if not rows:
        return
    yield ""
    yield (
        "What the driver's compiler made of the kernels that the tests launched: the"
        " most of up to three variants. Matrix instructions are counted in what Triton"
        " hands to the driver. Ahead-of-time figures are those of"
        " docs/data/machine_code.csv."
    )
    yield ""
    yield table(
        (
            *("kernel", "warps", "GRF", "variants", "registers", "spill"),
            *("matrix", "ahead: spill", "ahead: dpas"),
        ),
        (
            [
                f"`{row['kernel']}`",
                row["warps"],
                row["grf"] or "-",
                row["variants"],
                *(
                    [row["problem"], ""]
                    if row["problem"]
                    else [row["registers"], row["spill"]]
                ),
                row["matrix"],
                *(
                    "-" if row[name] is None else row[name]
                    for name in ("aot_spill", "aot_dpas")
                ),
            ]
            for row in rows
        ),
    )


def _compare(result: StageResult) -> Iterator[str]:
    report = result.data.get("benchmark")
    if not report:
        return
    roof = report["roofline"]
    yield ""
    yield (
        f"Copy {roof['bandwidth'] / 1e12:.2f} TB/s, bf16 product"
        f" {roof['matrix'] / 1e12:.0f} TFLOP/s. Medians in µs; those in a graph count."
    )
    yield ""
    heads = ("op", "tokens", "heads", "keys", "candidate", "graph", "direct")
    yield table(
        (*heads, "% of the roof", "time / ours", "note"), map(_figures, report["rows"])
    )


def _figures(row: Mapping[str, Any]) -> list[object]:
    figures = (
        "-" if row[name] is None else f"{row[name]:.{digits}f}"
        for name, digits in (
            ("captured", 1),
            ("direct", 1),
            ("percent_of_roof", 0),
            ("speedup_of_ours", 2),
        )
    )
    return [
        *(row["op"], row["tokens"], row["heads"] or "-", row["keys"] or "-"),
        row["candidate"],
        *figures,
        f"WRONG: {row['wrong']}" if row["wrong"] else row["note"],
    ]


def _tune(result: StageResult) -> Iterator[str]:
    rows = result.data.get("rows", {})
    if not rows:
        return
    yield ""
    yield f"`{result.data['file']}` has:"
    yield ""
    yield table(
        ("kernel", "configuration"),
        (
            (f"`{kernel}`", ", ".join(f"{k} {v}" for k, v in row.items()))
            for kernel, entries in rows.items()
            for row in entries
        ),
    )


def _serve(result: StageResult) -> Iterator[str]:
    checks = result.data.get("checks", [])
    if checks:
        yield ""
        yield table(
            ("check", "verdict", "figure"),
            ((c["check"], c["verdict"], c["figure"]) for c in checks),
        )


def _link(result: StageResult) -> Iterator[str]:
    steps = result.data.get("steps", [])
    if steps:
        yield ""
        yield "A layer of V4-Flash whose experts lie in the host's memory, in a graph."
        yield ""
        yield table(
            ("tokens", "experts", "µs", "hits", "UVA with as much memory, µs"),
            (
                [
                    *(step["tokens"], step["experts"], f"{step['microseconds']:.1f}"),
                    "-" if step["hits"] is None else f"{step['hits']:.0%}",
                    "-" if step["uva"] is None else f"{step['uva']:.1f}",
                ]
                for step in steps
            ),
        )


def _model(result: StageResult) -> Iterator[str]:
    if result.data:
        yield ""
        yield table(
            ("", "figure"),
            (
                (name.replace("_", " "), f"{value:.2f}")
                for name, value in result.data.items()
            ),
        )
