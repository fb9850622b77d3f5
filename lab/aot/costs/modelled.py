# SPDX-License-Identifier: Apache-2.0
"""The shapes that the cost model compares: our attention and upstream's v0.33.0.

The shape tells what the code does not show: how many iterations a loop has, and which
bytes must come from DRAM. Upstream's decode gathers the chosen rows into bf16 and
attends to those; the index arithmetic in torch between its two kernels is left out.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kernels.xpu_dsv4.mla._decode_config import decode_config
from lab.aot.calls import cases_attention, upstream
from lab.aot.calls.record import Launch, recording
from lab.aot.calls.shapes import CONTEXT, HEAD_DIM, WINDOW, i32, meta, pages
from lab.aot.costs.model import (
    Device,
    Estimate,
    ends,
    estimate,
    launched,
    memory_roof,
    together,
)
from lab.benchmarks.files import ATTENTION, DECODE
from lab.benchmarks.upstream import importing
from stack.core.cache import Cache

RELEASE = "0.33.0"
ROWS = "data/cost_model.csv"
"""The file of rows beside the page."""
KEY_BYTES, ROW_BYTES, PARTIAL_BYTES = 584, 2 * HEAD_DIM, 4 * (HEAD_DIM + 2)
"""Of a key in a page, of a row in bf16, and of a row's partial result."""
DIM_LANES = "_dim_lanes_prefill_kernel"
DIM_LANES_16 = "_dim_lanes_16_prefill_kernel"
LANE_BYTES = {DIM_LANES: 64, DIM_LANES_16: 64}
"""What is loaded of a cache line at least: by the lanes that read it
together."""
LINES = {DIM_LANES: 8 * 8, DIM_LANES_16: 2 * 8 * 16}
"""Lines that a sub-group looks up besides, before its loop over keys: eight loads of q
read of eight heads each, where the second half of the lanes reads what the first does,
or twice of 16 heads."""
ROUNDS = {DIM_LANES: 2, DIM_LANES_16: 2}
"""Iterations of a loop around that over keys: the second looks whether a score was far
from 0, and reads no key if none was."""
PREFILL_ROWS = 16384
"""Rows of the gathered buffer that a prefill chunk reads."""


@dataclass(frozen=True)
class Shape:
    """One call of attention.

    Attributes:
        op: "decode" or "prefill".
        tokens: queries.
        heads: of a rank.
        keys: per query.
    """

    op: str
    tokens: int
    heads: int
    keys: int

    @property
    def label(self) -> str:
        """The shape's name in the report."""
        return f"T{self.tokens} H{self.heads} K{self.keys}"

    def least_traffic(self) -> float:
        """Bytes that any implementation must move: queries, keys, and the result."""
        queries = 2 * self.tokens * self.heads * ROW_BYTES
        if self.op == "decode":
            return queries + self.tokens * self.keys * KEY_BYTES
        return queries + PREFILL_ROWS * ROW_BYTES


SHAPES = (
    Shape("decode", 1, 64, 640),
    Shape("decode", 16, 64, 640),
    Shape("decode", 128, 64, 640),
    Shape("decode", 128, 16, 640),
    Shape("decode", 128, 8, 640),
    Shape("decode", 1, 8, 640),
    Shape("decode", 16, 8, 640),
    Shape("decode", 64, 8, 640),
    Shape("decode", 200, 128, 1152),
    Shape("decode", 1, 64, CONTEXT // 128 + WINDOW),
    Shape("prefill", 2048, 64, 640),
    Shape("prefill", 2048, 8, 640),
    Shape("prefill", 2048, 128, 1152),
    *(
        Shape("prefill", 2048, heads, keys)
        for heads in (8, 16)
        for keys in (128, 256, 1152)
    ),
)


Code = tuple[Launch, Mapping[str, Any]]
"""A launch, and what `compile_launch` returned of it."""
Results = Mapping[Shape, Mapping[str, Sequence[Code]]]
"""Shape → "ours" and "upstream" → the launches in order."""


def record(
    cache: Cache, shapes: Sequence[Shape] = SHAPES
) -> dict[Shape, dict[str, list[Launch]]]:
    """The launches of every shape, of ours and of upstream's kernels."""
    with (
        importing(upstream.files(cache, RELEASE)) as load,
        upstream.newer_softmax(),
    ):
        return {
            shape: {
                "ours": _launches(partial(_ours, shape)),
                "upstream": _launches(partial(_upstream, shape, load)),
            }
            for shape in shapes
        }


def _launches(call: Callable[[], None]) -> list[Launch]:
    with recording() as launches:
        call()
    return launches


def _ours(shape: Shape) -> None:
    if shape.op == "prefill":
        cases_attention.prefill(shape.heads, shape.tokens, shape.keys)
    else:
        cases_attention.decode(shape.heads, shape.tokens, shape.keys - WINDOW, 64)


def _upstream(shape: Shape, load: upstream.Load) -> None:
    rows = PREFILL_ROWS
    if shape.op == "decode":
        rows = shape.tokens * shape.keys
        for width in (shape.keys - WINDOW, WINDOW):
            load(DECODE).dequant_gather_slots(
                meta(shape.tokens * width, HEAD_DIM),
                pages(64),
                meta(shape.tokens * width, dtype=i32),
                64,
            )
    load(ATTENTION).triton_bf16_mla_sparse_interface(
        meta(shape.tokens, shape.heads, HEAD_DIM),
        meta(rows, 1, HEAD_DIM),
        meta(shape.tokens, 1, shape.keys, dtype=i32),
        HEAD_DIM**-0.5,
        block_dpe=0,
    )


def turns_and_traffic(shape: Shape, launch: Launch) -> tuple[int, float, float]:
    """Iterations of a launch's loop, bytes that it moves from and to DRAM, and bytes of
    partial results that it leaves for the next launch or takes from the one before.

    Raises:
        KeyError: the model does not know the kernel.
    """
    tokens, heads, keys = shape.tokens, shape.heads, shape.keys
    rows = tokens * heads
    constants = launch.constexprs()
    if launch.name == "_dequant_gather_slots_kernel":
        return 1, launch.grid[0] * (KEY_BYTES + ROW_BYTES), 0
    if launch.name == "_merge_kernel":
        splits = decode_config(tokens, heads, keys).splits
        return 1, rows * ROW_BYTES, rows * splits * PARTIAL_BYTES
    tiles = math.ceil(keys / constants["BLOCK_N"])
    if launch.name == "_decode_kernel":
        blocks = tokens * math.ceil(heads / constants["BLOCK_H"])
        splits = launch.grid[0] // blocks
        traffic = tokens * keys * KEY_BYTES + rows * ROW_BYTES
        if splits == 1:
            return tiles, traffic + rows * ROW_BYTES, 0
        return math.ceil(tiles / splits), traffic, rows * splits * PARTIAL_BYTES
    if launch.name in ("_prefill_kernel", DIM_LANES, DIM_LANES_16):
        return tiles, shape.least_traffic(), 0
    if launch.name == "_bf16_mla_sparse_kernel":
        gathered = tokens * keys if shape.op == "decode" else PREFILL_ROWS
        return tiles, gathered * ROW_BYTES + 2 * rows * ROW_BYTES, 0
    raise KeyError(f"neither iterations nor traffic are known of {launch.name}")


def modelled(shape: Shape, codes: Sequence[Code], device: Device) -> Estimate:
    """The time of a shape's launches on a device, from their compiled code."""
    return together(
        [
            estimate(
                launched(
                    code["devices"][device.target],
                    math.prod(launch.grid),
                    launch.num_warps,
                    *turns_and_traffic(shape, launch),
                    lane_bytes=LANE_BYTES.get(launch.name, 0),
                    lines=LINES.get(launch.name, 0),
                    rounds=ROUNDS.get(launch.name, 1),
                ),
                device,
            )
            for launch, code in codes
        ]
    )


def csv_rows(results: Results, known: Sequence[Device]) -> list[dict[str, object]]:
    """The model's answers, a row for each shape and device: this stack's microseconds
    at both ends of what is known, what bounds them at the slow end, their ratio to the
    memory roof, and how many times longer upstream takes."""
    return [
        _row(shape, codes, device)
        for shape, codes in results.items()
        for device in known
    ]


def _row(
    shape: Shape, codes: Mapping[str, Sequence[Code]], device: Device
) -> dict[str, object]:
    fast, slow = ends(device)
    ours = modelled(shape, codes["ours"], slow)
    best = modelled(shape, codes["ours"], fast).microseconds
    roof = memory_roof(shape.least_traffic(), device)
    ratios = [
        modelled(shape, codes["upstream"], end).microseconds
        / modelled(shape, codes["ours"], end).microseconds
        for end in (slow, device, fast)
    ]
    return {
        "op": shape.op,
        "shape": shape.label,
        "device": device.name,
        "microseconds from": f"{best:.0f}",
        "microseconds to": f"{ours.microseconds:.0f}",
        "bound": ours.bound,
        "times the memory roof from": f"{best / roof:.1f}",
        "times the memory roof to": f"{ours.microseconds / roof:.1f}",
        "upstream takes from": f"{min(ratios):.0f}",
        "upstream takes to": f"{max(ratios):.0f}",
    }


def summary(rows: Sequence[Mapping[str, object]]) -> str:
    """What the page says of the rows: how many times longer upstream takes.

    Single tokens are summed up apart: nobody serves for long with one.
    """
    lines = [
        "**Modelled, not measured** (`lab/aot/costs/model.py`, constants, ranges and"
        " sources in `lab/aot/devices.toml`): time on the device alone. Host and"
        f" launches are left out. All rows: [{ROWS}]({ROWS})."
    ]
    for op in dict.fromkeys(str(row["op"]) for row in rows):
        of_op = [row for row in rows if row["op"] == op]
        single = [row for row in of_op if str(row["shape"]).startswith("T1 ")]
        many = [row for row in of_op if row not in single]
        lines.append(f"- {op}: upstream v{RELEASE} takes {_times_as_long(many)}.")
        if single:
            lines.append(f"- {op} of one token: {_times_as_long(single)}.")
    return "\n".join([lines[0], "", *lines[1:]])


def _times_as_long(rows: Sequence[Mapping[str, object]]) -> str:
    low, high = (
        [int(str(row[f"upstream takes {end}"])) for row in rows]
        for end in ("from", "to")
    )
    shapes = len({row["shape"] for row in rows})
    devices = len({row["device"] for row in rows})
    return (
        f"{min(low)} to {max(high)} times as long, median"
        f" {statistics.median(low):g} to {statistics.median(high):g},"
        f" over {shapes} shapes on {devices} devices"
    )


def text(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows for a terminal."""
    return "\n".join(" ".join(map(str, row.values())) for row in rows)
