# SPDX-License-Identifier: Apache-2.0
"""`python -m aot`: compile every shipped kernel for Intel GPUs and judge the result."""

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xpustack.cache import Cache

from . import compile as compiler
from . import report, shapes
from .ocloc import OclocError, find
from .record import Launch, recording


def record(
    origin: str, calls: Sequence[tuple[str, str, Callable[[], Any]]]
) -> list[tuple[str, str, str, Launch]]:
    """Run calls under the recorder: (origin, op, label, launch) of every launch."""
    found = []
    for op, label, call in calls:
        with recording() as launches:
            call()
        found += [(origin, op, label, launch) for launch in launches]
    return found


def rows(
    recorded: Sequence[tuple[str, str, str, Launch]], results: Sequence[compiler.Result]
) -> list[report.Row]:
    """Join launches with their results; launches of the same code share a row."""
    merged: dict[tuple[str, str, str], report.Row] = {}
    for (origin, op, label, launch), result in zip(recorded, results, strict=True):
        key = (origin, op, launch.key())
        before = merged.get(key)
        calls = (*before.calls, label) if before else (label,)
        merged[key] = report.Row(
            origin, op, launch.name, tuple(dict.fromkeys(calls)), launch, result
        )
    return list(merged.values())


def main(arguments: Sequence[str] | None = None) -> int:
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
    parser.add_argument("--refresh-ocloc", action="store_true", help="fetch it again")
    chosen = parser.parse_args(arguments)
    cache = Cache.default()
    try:
        ocloc = find(cache.root / "ocloc", refresh=chosen.refresh_ocloc)
    except OclocError as error:
        print(error, file=sys.stderr)
        return 5
    if chosen.call:
        recorded = record(
            "ours",
            [("call", chosen.call.name, lambda: runpy.run_path(str(chosen.call)))],
        )
    else:
        wanted = [
            (case.op, case.label, case.call)
            for case in shapes.cases()
            if (not chosen.op or case.op in chosen.op) and chosen.label in case.label
        ]
        recorded = record("ours", wanted)
    results = compiler.compile_all(
        [launch for *_, launch in recorded],
        chosen.device.split(","),
        ocloc,
        cache,
        jobs=chosen.jobs,
    )
    found = rows(recorded, results)
    for row in found:
        print(report.line(row))
    bad = sum(bool(row.faults()) for row in found)
    print(f"{len(found)} configurations, {bad} with faults")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
