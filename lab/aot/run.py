# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.aot`: compile every shipped kernel for Intel GPUs and judge it.

Upstream's kernels, which nothing judges, are compiled on request: they take as long.
"""

import argparse
import functools
import runpy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kernels.xpu_dsv4
from lab.aot import report
from lab.aot.calls import upstream
from lab.aot.calls.cases import cases
from lab.aot.calls.record import Launch, LaunchRecord, record_cases
from lab.aot.calls.shapes import EVERY, Case
from lab.aot.compiler import compile as compiler
from lab.aot.compiler.ocloc import OclocError, find
from lab.aot.costs import modelled
from lab.aot.costs.model import devices as known_devices
from lab.aot.coverage import launched, uncompiled, unspecialized
from lab.aot.trace import traced
from stack.core.cache import Cache
from stack.core.errors import StackError
from stack.core.markdown import with_section
from stack.core.project import Project
from stack.core.rows import csv_text
from stack.pages.made import stamped

SECTION, MODEL_SECTION = "aot", "model"
"""The generated sections of the page that `--docs` names."""


def rows(
    records: Sequence[LaunchRecord], results: Sequence[compiler.CompileResult]
) -> list[report.Row]:
    """Join launches with their results; launches of the same code share a row."""
    merged: dict[tuple[str, str, str], report.Row] = {}
    for record, result in zip(records, results, strict=True):
        launch = record.launch
        key = (record.origin, record.op, launch.key())
        before = merged.get(key)
        labels = (*before.calls, record.label) if before else (record.label,)
        calls = tuple(dict.fromkeys(labels))
        merged[key] = report.Row(
            record.origin, record.op, launch.name, calls, launch, result
        )
    return list(merged.values())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.aot", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--op", action="append", help="only this group of calls; may be repeated"
    )
    parser.add_argument("--label", default="", help="only calls whose label has this")
    parser.add_argument(
        "--call", type=Path, help="compile what this Python file launches instead"
    )
    parser.add_argument("--device", default=",".join(compiler.DEVICES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("build/aot.json"))
    parser.add_argument(
        "--upstream",
        action="store_true",
        help="report upstream's kernels too, and model the time of both",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        help="as --upstream; write this page's summaries, and rows beside it",
    )
    parser.add_argument("--refresh-ocloc", action="store_true", help="fetch it again")
    return parser.parse_args(arguments)


def selected(options: argparse.Namespace, cache: Cache) -> list[LaunchRecord]:
    """The launches that the options ask for: of one file, of some calls, or all of
    ours; `upstream` adds upstream's."""
    if options.call:
        run = partial(runpy.run_path, str(options.call))
        return record_cases("ours", [Case("call", options.call.name, run)])
    ours = record_cases(
        "ours",
        (
            case
            for case in cases()
            if (not options.op or case.op in options.op) and options.label in case.label
        ),
    )
    return [*upstream.record_releases(cache), *ours] if options.upstream else ours


def gaps(ours: Sequence[LaunchRecord]) -> list[str]:
    """What ships but is not among `ours`: kernels, configurations, specializations."""
    launches = [record.launch for record in ours]
    names = {launch.name for launch in launches}
    shipped = launched(Path(kernels.xpu_dsv4.__path__[0]))
    lines = [
        f"{name} ({file}): no call of lab/aot/cases*.py launches it"
        for name, file in shipped.items()
        if name not in names
    ]
    every, traces = _needed()
    missing = {**uncompiled(launches, every), **unspecialized(launches, traces)}
    lines += [
        f"{name}: [{label}] needs it and SHIPPED in lab/aot/calls/shapes.py lacks it"
        for name, label in missing.items()
    ]
    return lines


@functools.cache
def _needed() -> tuple[list[tuple[str, Launch]], list[tuple[str, Launch]]]:
    """The launches of calls of every size, and of what servers do step by step."""
    return _labelled(record_cases("ours", cases(EVERY))), _labelled(traced())


def _labelled(records: Sequence[LaunchRecord]) -> list[tuple[str, Launch]]:
    return [(f"{record.op} {record.label}", record.launch) for record in records]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return check(options)
    except (OclocError, StackError) as error:
        print(error, file=sys.stderr)
        return 5


def check(options: argparse.Namespace) -> int:
    """Compile, report and judge; 1 if a kernel of ours must not ship.

    Raises:
        OclocError, StackError: the compiler, an archive or the page cannot be had.
    """
    options.all = not (options.call or options.op or options.label)
    options.upstream = options.upstream or bool(options.docs)
    if options.upstream and not options.all:
        print("--upstream and --docs need all calls", file=sys.stderr)
        return 2
    if options.docs:
        # Known before minutes of compilation.
        for name in (SECTION, MODEL_SECTION):
            with_section(options.docs, name, "")
    started = time.monotonic()
    made = compiled(options)
    for row in made.rows:
        # All rows are hundreds of lines: a whole run leaves them to the report.
        if not options.all or row.faults():
            print(f"{row.origin} {report.line(row)}")
    write(made, options)
    ours = [row for row in made.rows if row.origin == "ours"]
    missing = gaps(made.ours) if options.all else []
    for gap in missing:
        print(f"FAILED {gap}")
    faulty = [row for row in ours if row.faults()]
    for row in faulty:
        print(f"FAILED {row.kernel} [{row.calls[0]}]: {'; '.join(row.faults())}")
    others = len(made.rows) - len(ours)
    reported = f"{others} of upstream's configurations reported, " if others else ""
    print(
        f"{made.compilers}: {reported}"
        f"{len(ours)} of ours judged, {len(faulty)} with faults, {len(missing)} gaps, "
        f"{time.monotonic() - started:.0f} s; {options.json}"
    )
    return 1 if faulty or missing else 0


@dataclass(frozen=True)
class Compiled:
    """What the compilers made: `ours`, our launches among the `rows`, and the kernels
    of the modelled `shapes` by whose they are."""

    compilers: str
    ours: list[LaunchRecord]
    rows: list[report.Row]
    shapes: modelled.Results


def compiled(options: argparse.Namespace) -> Compiled:
    """Compile what the options ask for.

    Raises:
        OclocError, StackError: the compiler or an archive cannot be had.
    """
    cache = Cache.default()
    ocloc = find(cache.root / "ocloc", refresh=options.refresh_ocloc)
    records = selected(options, cache)
    shapes = modelled.record(cache) if options.upstream else {}
    devices = options.device.split(",")
    # What is published is compiled for each device.
    own = devices if options.upstream else compiler.own_code(devices)
    with upstream.newer_softmax():
        compile_all = partial(
            compiler.compile_all,
            devices=own,
            ocloc=ocloc,
            store=cache,
            jobs=options.jobs,
        )
        results = [
            compiler.for_devices(result, devices)
            for result in compile_all([record.launch for record in records])
        ]
        codes = {
            shape: {
                whose: list(zip(launches, compile_all(launches), strict=True))
                for whose, launches in sides.items()
            }
            for shape, sides in shapes.items()
        }
    return Compiled(
        f"{compiler.front_end()} and ocloc {ocloc.version}",
        [record for record in records if record.origin == "ours"],
        rows(records, results),
        codes,
    )


def write(made: Compiled, options: argparse.Namespace) -> None:
    """Write the report, and with `--docs` the page's summaries and the rows beside it.

    Raises:
        StackError: the page cannot be had.
    """
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(report.to_json(made.rows, made.compilers))
    devices = options.device.split(",")
    targets = [device for device in known_devices() if device.target in devices]
    model = modelled.csv_rows(made.shapes, targets)
    if model:
        print(modelled.text(model))
    if not options.docs:
        return
    sections = {
        SECTION: report.summary(made.rows, made.compilers, devices),
        MODEL_SECTION: modelled.summary(model),
    }
    for name, section in sections.items():
        options.docs.write_text(with_section(options.docs, name, section))
    folder, project = options.docs.parent, Project.find()
    for name, rows_of in (
        (report.ROWS, report.csv_rows(made.rows)),
        (modelled.ROWS, model),
    ):
        (folder / name).write_text(csv_text(stamped(project, rows_of)))
