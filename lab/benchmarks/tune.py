# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.tune`: measure configurations and write the device's file.

Every candidate is first compared with the float64 reference on the inputs that are
timed; a wrong one, or one that does not compile, cannot win. A candidate replaces the
default where its geometric mean time over the shapes is at least 3 % shorter.
The program writes the file after each kernel, so an interrupted run keeps what it
measured.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.xpu_dsv4.indexer import _logits as scores
from kernels.xpu_dsv4.indexer._logits import LogitsConfig
from kernels.xpu_dsv4.mla import sparse_decode, sparse_prefill

from .cases import attention, indexer
from .device import UnusableDevice, add_device, describe, take_device
from .measure import Clock
from .tuned_rows import SCHEMA, TunedDecode, TunedPrefill, file_name
from .workload import Candidate, Competitors

GAIN = 0.97
"""A candidate must take at most this share of the default's time."""
RANGES = ((1, 16, 16), (17, 32, 32), (33, 128, 64))
"""Heads at least, at most, and those that are measured."""


@dataclass(frozen=True)
class Sweep:
    """One kernel, the shapes that count, and the configurations to try.

    Attributes:
        kernel: key of the file's rows.
        label: says which heads.
        rows: the candidates.
        shapes: each makes ours on one shape; the name is for the reader.
        patched: what the kernel's module asks for its configuration, replaced.
        module: where `patched` lies.
        replace: gives the replacement for a row.
    """

    kernel: str
    label: str
    rows: Sequence[NamedTuple]
    shapes: dict[str, Callable[[], Candidate]]
    module: Any
    patched: str
    replace: Callable[[Any], Any]


@dataclass(frozen=True)
class Tried:
    """One configuration: microseconds by shape, or what is wrong with it."""

    kernel: str
    label: str
    configuration: dict[str, Any] | None
    microseconds: dict[str, float]
    wrong: str = ""

    @property
    def mean(self) -> float:
        """Geometric mean over the shapes; infinite where it is wrong."""
        if self.wrong or not self.microseconds:
            return math.inf
        logs = map(math.log, self.microseconds.values())
        return math.exp(sum(logs) / len(self.microseconds))


@contextmanager
def using(sweep: Sweep, row: Any) -> Iterator[None]:
    """Let the kernel run with `row`; None is its own choice."""
    original = getattr(sweep.module, sweep.patched)
    if row is not None:
        setattr(sweep.module, sweep.patched, sweep.replace(row))
    try:
        yield
    finally:
        setattr(sweep.module, sweep.patched, original)


def attempt(sweep: Sweep, row: Any, clock: Clock) -> Tried:
    """Check, then time, one configuration on every shape."""
    configuration = None if row is None else row._asdict()
    times: dict[str, float] = {}
    with using(sweep, row):
        for name, make in sweep.shapes.items():
            try:
                ours = make()
                wrong = ours.check()
                if not wrong:
                    captured = clock.captured(ours.calls)
                    times[name] = (
                        clock.direct(ours.calls) if captured is None else captured
                    )
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error)[:200]}"
            if wrong:
                wrong = f"{name}: {wrong}"
                return Tried(sweep.kernel, sweep.label, configuration, times, wrong)
    return Tried(sweep.kernel, sweep.label, configuration, times)


def decode_rows(least: int, most: int, xpu: bool) -> list[TunedDecode]:
    """Candidates for a range of heads."""
    block_h = 16 if most <= 16 else 32 if most <= 32 else 64
    cores = torch.xpu.get_device_properties().max_compute_units // 8 if xpu else 132
    tiles = (
        [(16, w, 1, 256) for w in (4, 8, 16)] + [(32, 8, 1, 256)]
        if xpu
        else [
            (n, w, s, 128)
            for n in (32, 64)
            for w in ((4, 8) if most <= 32 else (8,))
            for s in (1, 2)
        ]
    )
    return [
        TunedDecode(least, most, block_h, n, cores * waves, warps, stages, grf, xpu)
        for n, warps, stages, grf in tiles
        for waves in ((1, 2, 4) if xpu else (1, 2))
    ]


def prefill_rows(least: int, most: int, xpu: bool) -> list[TunedPrefill]:
    """Candidates for a range of heads."""
    block_h = 16 if most <= 16 else 32 if most <= 32 else 64
    tiles = (
        [(n, w, 1, 256) for n in (16, 32) for w in (4, 8, 16)]
        if xpu
        else [(n, w, s, 128) for n in (32, 64) for w in (4, 8) for s in (1, 2, 3)]
    )
    return [
        TunedPrefill(least, most, block_h, n, warps, stages, grf, xpu)
        for n, warps, stages, grf in tiles
    ]


KERNELS = {
    "PAGED": "paged_mqa_logits",
    "PAGED_WORDS": "paged_mqa_logits_mxfp4",
    "GATHERED": "mqa_logits",
}
"""Keys of a file's rows, by the name of the default in `_logits`."""
KEYS = {"GATHERED": (64, 128, 256), "PAGED": (32, 64, 128), "PAGED_WORDS": (128, 256)}
"""Keys a tile of the candidates for the indexer's scores."""


def logits_rows(xpu: bool, name: str) -> list[LogitsConfig]:
    """Candidates for the indexer's scores."""
    return [
        LogitsConfig(m, n, warps, stages, grf)
        for m in ((8, 16, 32) if name == "GATHERED" else (1,))
        for n in KEYS[name]
        for warps in ((8, 16) if xpu else (4, 8))
        for stages in ((1,) if xpu else (1, 2))
        for grf in ((128, 256) if xpu else (128,))
    ]


def sweeps(device: torch.device) -> Iterator[Sweep]:
    """Logits first, which are few; then decode and prefill for each range of heads."""
    dry, xpu = device.type == "cpu", device.type == "xpu"
    sets = 1 if dry else 4
    decode = ((2, 128),) if dry else ((4, 16384), (64, 8192))
    prefill = ((3, 96),) if dry else ((256, 8192), (2048, 4096))
    both = ("FP8", "MXFP4")
    paged = {"PAGED": ("FP8",), "PAGED_WORDS": ("MXFP4",)} if xpu else {"PAGED": both}
    for name, formats in {**paged, "GATHERED": both}.items():
        is_paged = name != "GATHERED"
        yield Sweep(
            KERNELS[name],
            " and ".join(formats),
            logits_rows(xpu, name)[: 1 if dry else None],
            {
                f"{form} T{tokens} K{keys}": partial(
                    _logits, is_paged, form == "MXFP4", tokens, keys, device
                )
                for form in formats
                for tokens, keys in (decode if is_paged else prefill)
            },
            scores,
            name,
            lambda row: row,
        )
    for least, most, heads in RANGES[:1] if dry else RANGES:
        label = f"{least} to {most} heads"
        yield Sweep(
            "sparse_decode",
            label,
            decode_rows(least, most, xpu)[: 1 if dry else None],
            {
                f"T{tokens}": partial(
                    _decode, tokens, heads, 64 if dry else 512, device, sets
                )
                for tokens in ((2,) if dry else (1, 16, 128))
            },
            sparse_decode,
            "decode_config",
            lambda row: row.config,
        )
        yield Sweep(
            "sparse_prefill",
            label,
            prefill_rows(least, most, xpu)[: 1 if dry else None],
            {
                f"T{tokens}": partial(
                    _prefill, tokens, heads, 192 if dry else 640, device
                )
                for tokens in ((2,) if dry else (256, 1024))
            },
            sparse_prefill,
            "prefill_config",
            lambda row: row.config,
        )


NO_ONE = Competitors(Path("nowhere"), lambda path: sys)
"""Ours is measured alone."""


def _decode(
    tokens: int, heads: int, topk: int, device: torch.device, sets: int
) -> Candidate:
    return attention.decode(tokens, heads, topk, NO_ONE, device, sets)[0]


def _prefill(tokens: int, heads: int, keys: int, device: torch.device) -> Candidate:
    return attention.prefill(tokens, heads, keys, NO_ONE, device, 1)[0]


def _logits(
    paged: bool, fp4: bool, tokens: int, keys: int, device: torch.device
) -> Candidate:
    make = indexer.decode if paged else indexer.prefill
    return make(fp4, tokens, keys, device)[0]


def winner(tried: Sequence[Tried]) -> Tried | None:
    """The fastest that beats the default, which is the first; None if none does."""
    default, *others = tried
    best = min(others, key=lambda item: item.mean, default=default)
    return best if best.mean < GAIN * default.mean else None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.tune", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="a folder")
    parser.add_argument("--seconds", type=float, default=1200, help="stop after that")
    parser.add_argument("--kernel", help="tune this one alone")
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
    name = describe(device)
    print(f"tuning {name}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    clock = Clock(device)
    rows: dict[str, list[dict[str, Any]]] = {}
    log: list[Tried] = []
    left_out = 0
    chosen = [s for s in sweeps(device) if options.kernel in (None, s.kernel)]
    order = random.Random(0)
    for index, sweep in enumerate(chosen):
        # Each sweep gets its share of the time that is left, in an order that tries
        # different candidates first.
        now = time.monotonic()
        end = now + (started + options.seconds - now) / (len(chosen) - index)
        tried: list[Tried] = []
        for row in (None, *order.sample(list(sweep.rows), len(sweep.rows))):
            if tried and time.monotonic() > end:
                left_out += 1
                continue
            tried.append(attempt(sweep, row, clock))
        best = winner(tried)
        log += tried
        if best is not None and best.configuration is not None:
            rows.setdefault(sweep.kernel, []).append(best.configuration)
        share = (best or tried[0]).mean / tried[0].mean if tried[0].mean else 1.0
        print(
            f"{sweep.kernel}, {sweep.label}: {len(tried)} tried,"
            f" {sum(bool(item.wrong) for item in tried)} left out;"
            + (f" {100 * share:.0f} % of the default's time" if best else " default"),
            flush=True,
        )
        _write(options.out / "tried.json", [{**asdict(t)} for t in log])
        _write(
            options.out / file_name(name),
            {"schema": SCHEMA, "device": name, "rows": rows},
        )
    broken = [item for item in log if item.configuration is None and item.wrong]
    for item in broken:
        print(f"the default of {item.kernel}, {item.label}: {item.wrong}")
    print(
        f"{name}: {sum(map(len, rows.values()))} configurations written, {left_out}"
        f" left out for time, {time.monotonic() - started:.0f} s"
    )
    return 1 if broken else 0


def _write(path: Path, content: object) -> None:
    """Replace a file in one step."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
