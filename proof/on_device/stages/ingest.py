# SPDX-License-Identifier: Apache-2.0
"""Reads a device's report into this repository: a row of docs/devices.md, constants of
the cost model, and the tuned configurations, for a step that brings them."""

import json
import re
import tomllib
from pathlib import Path

from proof.on_device.stages import doctor
from proof.on_device.stages.records import Report
from stack.core.cache import atomic_file
from stack.core.errors import UsageError
from stack.core.markdown import table, with_section
from stack.core.project import Project

PAGE = "docs/devices.md"
SECTION = "devices"
MODEL = "lab/aot/devices.toml"
KERNELS = "kernels"
OPERATIONS_OF_A_DPAS = 2 * 8 * 16 * 16
"""Of one dpas.8x8 of bf16 over 16 lanes: 8 rows, 16 columns, 16 products each."""
HEADS = (
    *("device", "report", "release", "driver", "tests", "copy", "bf16 product"),
    *("decode of 16 tokens, 64 heads", "tuned", "link", "served"),
    "its own checkpoint, experts in host memory",
)


def ingest(project: Project, report: Report) -> list[str]:
    """Write these files; return what a person should know, one line each.

    Raises:
        UsageError: the page, the cost model's data or the tuned file's name has not the
            expected form.
    """
    page = project.root / PAGE
    text = with_section(page, SECTION, _rows(page, report))
    said = [f"{PAGE}: {report.device}"]
    constants, told = _calibrated(project, report)
    tuned, about_tuned = _tuned(report)
    if tuned is not None:
        path, content = tuned
        (project.root / path).parent.mkdir(exist_ok=True)
        with atomic_file(project.root / path) as file:
            file.write(content)
    if constants is not None:
        with atomic_file(project.root / MODEL) as file:
            file.write(constants.encode())
    with atomic_file(page) as file:
        file.write(text.encode())
    return [*said, told, about_tuned]


def _rows(page: Path, report: Report) -> str:
    """The section's table with the report's row; an older one of it is replaced."""
    text = page.read_text("utf-8") if page.is_file() else ""
    begin, end = f"<!-- {SECTION}: begin -->", f"<!-- {SECTION}: end -->"
    section = text.partition(begin)[2].partition(end)[0]
    own = _cells(report)
    rows = [
        [
            cell.strip().replace(r"\|", "|")
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]
        ]
        for line in section.strip().splitlines()[2:]
    ]
    others = [row for row in rows if row[:3] != own[:3]]
    return table(HEADS, sorted([*others, own]))


def _cells(report: Report) -> list[str]:
    roof = _roofline(report)
    prove, tune, serve = (report.stage(s) for s in ("prove", "tune", "serve"))
    link, model = report.stage("link"), report.stage("model")
    return [
        report.device,
        report.time,
        report.release,
        report.fact("driver") or "-",
        f"{prove.status}: {prove.summary}" if prove else "-",
        f"{roof[0] / 1e12:.2f} TB/s" if roof else "-",
        f"{roof[1] / 1e12:.0f} TFLOP/s" if roof else "-",
        _decode(report),
        tune.summary if tune else "-",
        link.summary if link else "-",
        f"{serve.status}: {serve.summary}" if serve else "-",
        f"{model.status}: {model.summary}" if model else "-",
    ]


def _roofline(report: Report) -> tuple[float, float] | None:
    compare = report.stage("compare")
    benchmark = compare.data.get("benchmark") if compare else None
    if not benchmark:
        return None
    roof = benchmark["roofline"]
    return float(roof["bandwidth"]), float(roof["matrix"])


def _decode(report: Report) -> str:
    compare = report.stage("compare")
    benchmark = compare.data.get("benchmark") if compare else None
    for row in benchmark["rows"] if benchmark else ():
        shape = (row["op"], row["tokens"], row["heads"], row["candidate"])
        if shape == ("decode", 16, 64, "ours") and row["direct"]:
            best = row["captured"] or row["direct"]
            return f"{best:.1f} µs, {row['percent_of_roof']:.0f} % of the roof"
    return "-"


def _calibrated(project: Project, report: Report) -> tuple[str | None, str]:
    """The cost model's data with the measured rates (None: unchanged), and what to
    say."""
    roof = _roofline(report)
    if report.kind != "xpu":
        return None, f"{MODEL}: unchanged, the cost model is of Intel GPUs"
    if roof is None:
        return None, f"{MODEL}: unchanged, the report has no figures of `compare`"
    text = (project.root / MODEL).read_text("utf-8")
    devices = tomllib.loads(text)["device"]
    name = doctor.known_as(report.device, list(devices))
    if not name:
        return None, (
            f"{MODEL}: unchanged, it has no {report.device}; add [device.…] with its"
            f" target, xe_cores = {report.fact('Xe-cores') or '…'} and gigahertz, then"
            " ingest again"
        )
    bandwidth, matrix = roof
    device = devices[name]
    # An Xe-core has as many matrix engines as vector engines.
    peak = doctor.ENGINES * device["xe_cores"] * device["gigahertz"] * 1e9
    measured = {
        "gigabytes_per_second": f"{bandwidth / 1e9:.0f}",
        # It is what a stream of loads and stores attained, not a published rate.
        "dram_share": "[1, 1]",
        "dpas_clocks": f"{peak * OPERATIONS_OF_A_DPAS / matrix:.1f}",
    }
    source = f"measured, {report.time}: copy and bf16 product; else {_rest(device)}"
    return _edited(text, name, measured, source), f"{MODEL}: {name} calibrated"


def _tuned(report: Report) -> tuple[tuple[str, bytes] | None, str]:
    """The path and the content of the device's tuned configurations (None where the
    report has none to ship), and what to say.

    Raises:
        UsageError: the report names another place than `tuned/`.
    """
    tune = report.stage("tune")
    where = f"{KERNELS}/tuned"
    if report.kind != "xpu":
        return None, f"{where}: unchanged, it is for Intel GPUs"
    if tune is None or tune.status != "passed":
        return None, f"{where}: unchanged, the stage `tune` did not pass"
    if lacking := {"file", "schema", "device", "rows"} - tune.data.keys():
        raise UsageError(f"the report's `tune` has no {', '.join(sorted(lacking))}")
    if not any(tune.data["rows"].values()):
        return None, f"{where}: unchanged, no tuned configuration beat the default"
    file = tune.data["file"]
    if not re.fullmatch(r"tuned/[a-z0-9-]+\.json", file):
        raise UsageError(
            f"the report's tuned file is {file!r}, not tuned/NAME.json", path=where
        )
    content = {key: tune.data[key] for key in ("schema", "device", "rows")}
    path = f"{KERNELS}/{file}"
    return (path, json.dumps(content, indent=1).encode() + b"\n"), (
        f"{path}: no step reads it yet; docs/decisions.md says what such a step changes"
    )


def _rest(device: dict[str, object]) -> str:
    """What the source said before it was calibrated."""
    return str(device["source"]).rpartition("; else ")[2]


def _edited(text: str, name: str, values: dict[str, str], source: str) -> str:
    """The file's text with values of one device replaced or added."""
    head = f'[device."{name}"]\n'
    before, found, rest = text.partition(head)
    if not found:
        raise UsageError(f"the file has no line {head.strip()}", path=MODEL)
    own, blank, after = rest.partition("\n\n")
    lines = [
        line
        for line in own.splitlines()
        if line.partition(" = ")[0] not in (*values, "source")
    ]
    lines += [f"{key} = {value}" for key, value in values.items()]
    quoted = source.replace("\\", "\\\\").replace('"', '\\"')
    lines.append(f'source = "{quoted}"')
    ended = "\n".join(lines) + ("" if blank else "\n")
    result = before + head + ended + blank + after
    tomllib.loads(result)
    return result
