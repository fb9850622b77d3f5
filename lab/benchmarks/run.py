# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.run`: check, then time, candidates side by side on one GPU.

Needs only torch, Triton and this repository; upstream's kernels and FlashMLA are
measured where `.bench/` has them. Every candidate is first checked on the inputs that
are timed, and a wrong one gets no figure. Measurements are printed and written one by
one, so an interrupted run keeps those that it made.
"""

import argparse
import csv
import gc
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton

from .device import UnusableDevice, add_device, describe, take_device

if TYPE_CHECKING:
    from .measure import Clock, Roofline
    from .workload import Candidate, Case, Competitors


@dataclass(frozen=True)
class Measurement:
    """One candidate on one case: medians in microseconds.

    Attributes:
        captured: time within a graph; None where it was not captured.
        direct: time when the host launches each call.
        roof: the shortest time that the device allows.
        speedup_of_ours: how many times as long as ours it takes.
        wrong: why it gives no figure; empty if it is right.
    """

    op: str
    tokens: int
    heads: int
    keys: int
    candidate: str
    captured: float | None
    direct: float | None
    roof: float
    percent_of_roof: float | None
    speedup_of_ours: float | None
    wrong: str
    note: str


def measure(case: "Case", clock: "Clock", roofline: "Roofline") -> list[Measurement]:
    """Check and time every candidate of a case; the first one is ours."""
    roof = roofline.microseconds(case.traffic, case.operations)
    rows: list[Measurement] = []
    ours: float | None = None
    for candidate in case.candidates():
        wrong, captured, direct = _attempt(candidate, clock)
        figure = direct if captured is None else captured
        if not rows:
            ours = figure
        rows.append(
            Measurement(
                case.op,
                case.tokens,
                case.heads,
                case.keys,
                candidate.name,
                captured,
                direct,
                roof,
                100 * roof / figure if figure else None,
                figure / ours if figure and ours else None,
                wrong,
                candidate.note,
            )
        )
    return rows


def _attempt(
    candidate: "Candidate", clock: "Clock"
) -> tuple[str, float | None, float | None]:
    """(what is wrong, time within a graph, time of direct calls)."""
    try:
        wrong = candidate.check()
        if wrong:
            return wrong, None, None
        captured = clock.captured(candidate.calls) if candidate.capture else None
        return "", captured, clock.direct(candidate.calls)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}", None, None


def text(case: "Case", rows: Sequence[Measurement]) -> str:
    """The lines of one case for a terminal."""
    lines = [f"{case.label}  roof {rows[0].roof:.1f} us" if rows else case.label]
    for row in rows:
        if row.wrong:
            lines.append(f"  {row.candidate:16} WRONG {row.wrong}")
            continue
        captured = "-" if row.captured is None else f"{row.captured:.1f}"
        lines.append(
            f"  {row.candidate:16} graph {captured:>9} us  direct {row.direct:9.1f} us"
            f"  {row.percent_of_roof or 0:5.1f} % of the roof"
            f"  {row.speedup_of_ours or 0:6.2f}x the time of ours"
            + (f"  ({row.note})" if row.note else "")
        )
    return "\n".join(lines)


def environment(
    device: torch.device, arguments: Sequence[str] | None = None
) -> dict[str, str]:
    """What the figures were measured on, and the command."""
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "command": shlex.join(["python", "-m", "lab.benchmarks.run", *words]),
        "device": describe(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def all_cases(
    competitors: "Competitors", device: torch.device, ops: Sequence[str]
) -> Iterator["Case"]:
    """The cases of the ops, decode and prefill first, in case time runs out."""
    from .cases import (
        attention,
        attention_output,
        compressor,
        experts,
        indexer,
        layer,
    )

    for part in (attention, attention_output, indexer, compressor, layer, experts):
        for case in part.cases(competitors, device):
            if not ops or any(case.op.startswith(op) for op in ops):
                yield case


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.run", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path(".bench/results"))
    parser.add_argument("--others", type=Path, default=Path(".bench"))
    parser.add_argument("--op", action="append", default=[], help="may be repeated")
    parser.add_argument("--seconds", type=float, default=540, help="stop after that")
    add_device(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    started = time.monotonic()
    try:
        device = take_device(options.device)
    except UnusableDevice as error:
        print(error, file=sys.stderr)
        return 5
    from .measure import Clock
    from .workload import competitors_in

    torch.manual_seed(0)
    clock = Clock(device)
    roofline = clock.roofline()
    facts = environment(device, arguments)
    print(
        f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}: copy "
        f"{roofline.bandwidth / 1e12:.2f} TB/s, bf16 product "
        f"{roofline.matrix / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Measurement] = []
    skipped = 0
    with (
        competitors_in(options.others) as competitors,
        (options.out / "benchmark.csv").open("w", newline="") as file,
    ):
        table = csv.DictWriter(file, [field.name for field in fields(Measurement)])
        table.writeheader()
        for case in all_cases(competitors, device, options.op):
            if time.monotonic() - started > options.seconds:
                skipped += 1
                continue
            new = measure(case, clock, roofline)
            print(text(case, new), flush=True)
            rows += new
            table.writerows(asdict(row) for row in new)
            file.flush()
            report = {
                "environment": facts,
                "roofline": asdict(roofline),
                "rows": [asdict(row) for row in rows],
            }
            (options.out / "benchmark.json").write_text(json.dumps(report, indent=1))
            gc.collect()
    for line in sorted(set(competitors.missing)):
        print(f"not measured: {line}")
    wrong = sum(bool(row.wrong) for row in rows)
    print(
        f"{facts['device']}: {len(rows)} figures, {wrong} wrong, {skipped} cases left "
        f"out for time, {time.monotonic() - started:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
