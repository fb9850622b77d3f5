# SPDX-License-Identifier: Apache-2.0
"""`python -m aot`: compile every shipped kernel for Intel GPUs and judge the result."""

import argparse
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kernels.xpu_dsv4
from xpustack.core.cache import Cache
from xpustack.core.errors import StackError

from . import compile as compiler
from . import report, upstream
from .cases import cases
from .coverage import launched, uncompiled
from .ocloc import OclocError, find
from .record import Launch, recording
from .shapes import EVERY

BEGIN, END = "<!-- aot: begin -->", "<!-- aot: end -->"
Recorded = tuple[str, str, str, Launch]


def record(
    origin: str, calls: Sequence[tuple[str, str, Callable[[], Any]]]
) -> list[Recorded]:
    """Run calls under the recorder: (origin, op, label, launch) of every launch."""
    found: list[Recorded] = []
    with recording() as launches:
        for op, label, call in calls:
            before = len(launches)
            call()
            found += [(origin, op, label, launch) for launch in launches[before:]]
    return found


def rows(
    launches: Sequence[Recorded], results: Sequence[compiler.Result]
) -> list[report.Row]:
    """Join launches with their results; launches of the same code share a row."""
    merged: dict[tuple[str, str, str], report.Row] = {}
    for (origin, op, label, launch), result in zip(launches, results, strict=True):
        key = (origin, op, launch.key())
        before = merged.get(key)
        calls = (*before.calls, label) if before else (label,)
        merged[key] = report.Row(
            origin, op, launch.name, tuple(dict.fromkeys(calls)), launch, result
        )
    return list(merged.values())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m aot", description=__doc__)
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
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    parser.add_argument("--refresh-ocloc", action="store_true", help="fetch it again")
    return parser.parse_args(arguments)


def recorded(chosen: argparse.Namespace, cache: Cache) -> list[Recorded]:
    """What the arguments choose: one file's launches, some calls, or everything."""
    if chosen.call:
        run = partial(runpy.run_path, str(chosen.call))
        return record("ours", [("call", chosen.call.name, run)])
    wanted = [
        (case.op, case.label, case.call)
        for case in cases()
        if (not chosen.op or case.op in chosen.op) and chosen.label in case.label
    ]
    ours = record("ours", wanted)
    if chosen.op or chosen.label:
        return ours
    return [*upstream.record(cache), *ours]


def gaps(ours: Sequence[Recorded]) -> list[str]:
    """What ships but is not among `ours`: kernels, and configurations."""
    names = {launch.name for *_, launch in ours}
    shipped = launched(Path(kernels.xpu_dsv4.__path__[0]))
    found = [
        f"{name} ({file}): no call of aot/cases*.py launches it"
        for name, file in shipped.items()
        if name not in names
    ]
    every = record("ours", [(case.op, case.label, case.call) for case in cases(EVERY)])
    missing = uncompiled(
        (launch for *_, launch in ours),
        ((f"{op} {label}", launch) for _, op, label, launch in every),
    )
    found += [
        f"{name}: [{label}] needs it and SHIPPED in aot/shapes.py does not compile it"
        for name, label in missing.items()
    ]
    return found


def write_table(docs: Path, table: str) -> None:
    """Replace what stands between the markers in `docs`."""
    before, begin, rest = docs.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{docs} lacks {BEGIN} or {END}")
    docs.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    cache = Cache.default()
    started = time.monotonic()
    try:
        ocloc = find(cache.root / "ocloc", refresh=chosen.refresh_ocloc)
        found_launches = recorded(chosen, cache)
    except (OclocError, StackError) as error:
        print(error, file=sys.stderr)
        return 5
    devices = chosen.device.split(",")
    with upstream.newer_softmax():
        results = compiler.compile_all(
            [launch for *_, launch in found_launches],
            devices,
            ocloc,
            cache,
            jobs=chosen.jobs,
        )
    found = rows(found_launches, results)
    for row in found:
        print(f"{row.origin} {report.line(row)}")
    compilers = f"{compiler.front_end()} and ocloc {ocloc.version}"
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(report.to_json(found, compilers))
    if chosen.docs:
        write_table(chosen.docs, report.table(found, compilers, devices))
    ours = [row for row in found if row.origin == "ours"]
    part = chosen.call or chosen.op or chosen.label
    mine = [recorded for recorded in found_launches if recorded[0] == "ours"]
    unseen = [] if part else gaps(mine)
    for gap in unseen:
        print(f"FAILED {gap}")
    bad = [row for row in ours if row.faults()]
    for row in bad:
        print(f"FAILED {row.kernel} [{row.calls[0]}]: {'; '.join(row.faults())}")
    print(
        f"{compilers}: {len(found) - len(ours)} of upstream's configurations reported, "
        f"{len(ours)} of ours judged, {len(bad)} with faults, {len(unseen)} gaps, "
        f"{time.monotonic() - started:.0f} s; {chosen.json}"
    )
    return 1 if bad or unseen else 0
