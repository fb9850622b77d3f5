# SPDX-License-Identifier: Apache-2.0
"""Which part of a layer a kernel belongs to, from a profile in eager mode.

Each part of a model runs in a profiler range of its name, and ranges nest. A kernel
counts for the innermost part that was running when it was launched. If a stand-in was
running, too, its time is the stand-in's.
"""

import bisect
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

PART = "part "
STAND_IN = "stand-in "
BY_CLASS = {
    r"Compressor$": "compressor",
    r"Indexer(Op)?$|SparseAttnIndexer": "indexer",
    r"^MHC|^HC": "hyper-connections",
    r"MoE$": "experts",
    r"Linear$": "projections",
}
BY_OP = {
    r"::(mhc|hc)_": "hyper-connections",
    r"mqa_logits|top_k_per_row|cp_gather_indexer": "indexer",
}
BY_METHOD = {
    "forward_mqa": "attention",
    "_fused_qnorm_rope_kv_insert": "insert",
    "_o_proj": "projections",
}
WHOLE = {"indexer", "experts", "compressor"}
"""Parts whose inner modules belong to them, whatever they are."""
OTHER = "other"


def named(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(PART + part):
            return function(*args, **kwargs)

    return run


def name_parts(
    model: torch.nn.Module,
    named: Callable[[str, Callable[..., Any]], Callable[..., Any]] = named,
) -> None:
    """Name the ranges of a model's parts, by default for profiles."""
    owners: dict[str, str] = {}
    for name, module in model.named_modules():
        outer = [part for owner, part in owners.items() if name.startswith(owner + ".")]
        if any(part in WHOLE and part != "compressor" for part in outer):
            continue
        part = part_of_class(type(module).__name__)
        if part and not (part == "projections" and outer):
            owners[name] = part
            module.forward = named(part, module.forward)
        for method, part in BY_METHOD.items():
            if hasattr(module, method) and hasattr(module, "swa_cache_layer"):
                setattr(module, method, named(part, getattr(module, method)))


def part_of_class(name: str) -> str | None:
    found = (part for pattern, part in BY_CLASS.items() if re.search(pattern, name))
    return next(found, None)


@dataclass(frozen=True)
class Row:
    """Kernels of one name in one part: microseconds and launches of the profile."""

    part: str
    stand_in: str
    kernel: str
    microseconds: float
    launches: int


def rows_of_trace(trace: Path) -> list[Row]:
    """Read a trace that torch's profiler exported."""
    return rows_of_events(json.loads(trace.read_text())["traceEvents"])


def rows_of_events(events: list[dict[str, Any]]) -> list[Row]:
    """Kernels by part, the longest first."""
    launches: dict[int, tuple[Any, float]] = {}
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        kind = event.get("cat", "")
        if kind in ("cuda_runtime", "cuda_driver", "privateuse1_runtime"):
            number = event["args"].get("correlation")
            launches[number] = (event["tid"], event["ts"])
        elif kind == "user_annotation" and event.get("ph") == "X":
            end = event["ts"] + event["dur"]
            ranges[event["tid"]].append((event["ts"], end, event["name"]))
    for found in ranges.values():
        found.sort()
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        number = event["args"].get("correlation")
        thread, at = launches.get(number, (None, 0.0))
        part, stand_in = owner_at(ranges.get(thread, []), at)
        entry = sums[part, stand_in, event["name"]]
        entry[0] += event["dur"]
        entry[1] += 1
    rows = [Row(*key, value[0], int(value[1])) for key, value in sums.items()]
    return sorted(rows, key=lambda row: -row.microseconds)


def owner_at(ranges: list[tuple[float, float, str]], at: float) -> tuple[str, str]:
    """The innermost part and stand-in around a moment, from sorted ranges."""
    part, stand_in = "", ""
    for begin, end, name in ranges[: bisect.bisect_right(ranges, (at, 1e30, ""))]:
        if not begin <= at < end:
            continue
        if name.startswith(PART):
            part = name.removeprefix(PART)
        elif name.startswith(STAND_IN):
            stand_in = name.removeprefix(STAND_IN)
    return part_of(part or OTHER, stand_in), stand_in


def part_of(part: str, stand_in: str) -> str:
    """The part of a kernel: its range's, or of a stand-in's op that lies in none."""
    if part != OTHER:
        return part
    found = (p for pattern, p in BY_OP.items() if re.search(pattern, stand_in))
    return next(found, OTHER)
