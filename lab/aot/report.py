# SPDX-License-Identifier: Apache-2.0
"""The report of machine code: rows, and the rules that a shipped kernel must meet."""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lab.aot.calls.record import Launch
from lab.aot.compiler.compile import CompileResult
from lab.aot.costs.model import Device, devices, launched, resident
from stack.core.markdown import table

DPAS_ROWS, DPAS_COLUMNS = 8, 16
"""Rows and columns of a matrix instruction: sub-groups that share fewer repeat work."""
MOST_ITEMS, MOST_SLM = 1024, 131072
"""Work-items and bytes of shared local memory that a work-group may have."""
ROWS = "data/machine_code.csv"
"""The file of rows beside the page."""
OURS = "This stack"
"""How the rows and the page name what this repository ships."""
TURN = {
    "_decode_kernel": "BLOCK_N",
    "_prefill_kernel": "BLOCK_N",
    "_dim_lanes_prefill_kernel": "BLOCK_N",
    "_dim_lanes_16_prefill_kernel": "BLOCK_N",
    "_bf16_mla_sparse_kernel": "BLOCK_N",
    "mqa_logits_kernel": "BLOCK_N",
    "paged_mqa_logits_kernel": "BLOCK_N",
    "_gather_paged_kernel": "BLOCK_M",
    "_compress_insert_kernel": "UNROLLED",
}
"""Kernel → its parameter that says how many keys or rows an iteration of its longest
loop takes. The loops of others go over parts of a row, or over indices."""


@dataclass(frozen=True)
class Row:
    """One kernel in one configuration, and all calls that launch it.

    Attributes:
        origin: "ours", or the release that the kernel comes from.
        op: group of calls.
        kernel: name of the kernel.
        calls: labels of the calls that launch exactly this code.
        launch: its configuration.
        result: what `compile_launch` returned, or {"error": …}.
    """

    origin: str
    op: str
    kernel: str
    calls: tuple[str, ...]
    launch: Launch
    result: CompileResult

    def faults(self) -> list[str]:
        """Why this row must not ship; empty if it may."""
        if "error" in self.result:
            return [f"does not compile: {self.result['error'].strip()[-300:]}"]
        faults = []
        dots = self.result["dots"]
        for device, code in self.result["devices"].items():
            if code["spill"]:
                faults.append(f"{device}: {code['spill']} bytes of spill per thread")
            if dots and not code["total"]["dpas"]:
                faults.append(f"{device}: a matrix product without dpas")
            if code["slm"] > MOST_SLM:
                faults.append(f"{device}: {code['slm']} bytes of SLM per work-group")
        if self.result["threads_per_warp"] * self.launch.num_warps > MOST_ITEMS:
            faults.append(f"more than {MOST_ITEMS} work-items per work-group")
        for dot in dots:
            shape, warps = dot["shape"], dot["warps"]
            if warps is None:
                faults.append(f"product {shape} is not on the matrix unit")
            elif dot["of_probabilities"] and not self._over_dims(dot):
                faults.append(f"PV product {shape} has sub-groups {warps}")
        return list(dict.fromkeys(faults))

    def _over_dims(self, dot: dict[str, Any]) -> bool:
        """Whether the sub-groups share the value dims of a PV product, its columns or,
        where it is transposed, its rows, and repeat nothing of the other axis."""
        if self.launch.num_warps == 1:
            return True
        rows, columns = map(int, dot["shape"][-2:])
        over_rows, over_columns = map(int, dot["warps"][-2:])
        if dot["transposed"]:
            return over_rows > 1 and over_columns * DPAS_COLUMNS <= max(
                columns, DPAS_COLUMNS
            )
        return over_columns > 1 and over_rows * DPAS_ROWS <= max(rows, DPAS_ROWS)

    def to_json(self) -> dict[str, Any]:
        """The row for programs."""
        return {
            "origin": self.origin,
            "op": self.op,
            "kernel": self.kernel,
            "calls": list(self.calls),
            "constexprs": {k: str(v) for k, v in self.launch.constexprs().items()},
            "num_warps": self.launch.num_warps,
            "num_stages": self.launch.num_stages,
            "grf_asked": self.launch.grf,
            "faults": self.faults(),
            **{k: v for k, v in self.result.items() if k != "cached"},
        }


def figures(code: dict[str, Any]) -> dict[str, int]:
    """The figures of a device's machine code that the report shows, by name."""
    total, loop = code["total"], code["loop"]
    return {
        **{name: code[name] for name in ("spill", "grf", "simd", "slm")},
        **{name: total[name] for name in ("dpas", "sends", "instructions")},
        "loop": loop["instructions"],
        "narrow": loop["narrow_loads"],
        "barriers": loop["barriers"],
        "rare": loop["rare"],
    }


def rates(row: Row, device: str) -> dict[str, str]:
    """What a sub-group executes for one key or row of the longest loop, where `TURN`
    knows how many an iteration has, the bytes of an average message of the loop, and
    the work-groups that an Xe-core of the device holds, where `model` knows it."""
    code = row.result["devices"][device]
    loop, known = code["loop"], _by_target().get(device)
    size = TURN.get(row.kernel) if loop["instructions"] else None
    keys = int(row.launch.constexprs()[size]) if size else 0
    moved, sends = loop["slm"] + loop["memory"], loop["sends"]
    return {
        "instructions a key": f"{loop['instructions'] / keys:.4g}" if keys else "",
        "dpas a key": f"{loop['dpas'] / keys:.4g}" if keys else "",
        "narrow a key": f"{loop['narrow_loads'] / keys:.4g}" if keys else "",
        "bytes a message": f"{moved / sends:.0f}" if sends else "",
        "work-groups": str(_held(row, code, known)) if known else "",
    }


@functools.cache
def _by_target() -> dict[str, Device]:
    """A device of each target: Xe-cores of one target are alike."""
    return {device.target: device for device in devices()}


def _held(row: Row, code: dict[str, Any], device: Device) -> int:
    try:
        return resident(launched(code, 0, row.launch.num_warps, 0, 0), device)
    except ValueError:
        return 0


def products(row: Row) -> str:
    """The matrix products of a row: count, shape and sub-groups; `P` marks a product
    of probabilities and values."""
    counts = Counter(
        f"{'P ' if dot['of_probabilities'] else ''}"
        f"{'x'.join(map(str, dot['shape']))} over {dot['warps']}"
        for dot in row.result["dots"]
    )
    return ", ".join(f"{count} of {text}" for text, count in counts.items())


def line(row: Row) -> str:
    """A row for a terminal: worst figures over the devices, then the faults."""
    if "error" in row.result:
        return f"{row.kernel}: {row.faults()[0]}"
    worst = _by_name(row)
    values = " ".join(f"{name}={max(of)}" for name, of in worst.items())
    dots = products(row)
    constants = {
        k: v
        for k, v in row.launch.constexprs().items()
        if k.isupper() and v is not None
    }
    text = (
        f"{row.kernel} warps={row.launch.num_warps} grf={row.launch.grf or 'default'} "
        f"{constants}\n    {values}  dots {dots or 'none'}  [{_calls(row)}]"
    )
    for fault in row.faults():
        text += f"\n    FAULT {fault}"
    return text


def to_json(rows: Sequence[Row], compilers: str) -> str:
    """The whole report for programs."""
    report = {"compilers": compilers, "rows": [row.to_json() for row in rows]}
    return json.dumps(report, indent=1) + "\n"


def csv_rows(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The whole report as data: a row for each kernel and device. `spill` is in bytes
    per hardware thread, `slm` in bytes per work-group, `loop` in instructions of one
    iteration of the longest loop, `narrow` in loads of 8 or 16 bits from SLM among
    them, `barriers` in waits of that iteration; `rare` instructions of its arms that
    `loops` leaves out. `rates` has the others."""
    return [
        cells
        for name, group in _by_origin(rows)
        for row in group
        for cells in _device_rows(name, row)
    ]


def summary(rows: Sequence[Row], compilers: str, devices: Sequence[str]) -> str:
    """What the page says of the report, in Markdown: the worst of each op, of this
    stack and of the newest release of upstream."""
    groups = dict(_by_origin(rows))
    newest = [name for name in groups if name != OURS][-1:]
    sides = [_worst(groups.get(name, ())) for name in (*newest, OURS)]
    ops = dict.fromkeys(op for side in sides for op in side)
    heads = ["op"]
    for name in (*newest, OURS):
        heads += [f"{name}: spill", "longest loop"]
    cells = (
        [op, *(text for side in sides for text in side.get(op, ("-", "-")))]
        for op in ops
    )
    return "\n".join(
        (
            f"Compiled with {compilers}, for {', '.join(devices)}. The front end is"
            " older than the deployed Triton 3.7 to 3.8. The worst kernel of each op,"
            " over its configurations and devices: bytes of spill per hardware thread,"
            " and instructions of one iteration of the longest loop (0: no loop). All"
            f" rows: [{ROWS}]({ROWS}).",
            "",
            table(heads, cells),
        )
    )


def _by_origin(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows by what they are of, oldest release first and this stack last."""
    origins = sorted({row.origin for row in rows}, key=lambda o: (o == "ours", o))
    return [
        (
            OURS if origin == "ours" else f"Upstream {origin}",
            [row for row in rows if row.origin == origin],
        )
        for origin in origins
    ]


def _device_rows(name: str, row: Row) -> Iterator[dict[str, object]]:
    """A row for each device; a single one, with the reason, if it does not compile."""
    cells: dict[str, object] = {
        **({} if name == OURS else {"release": row.origin}),
        "by": name,
        "op": row.op,
        "kernel": row.kernel,
        "calls": _calls(row),
        "warps": row.launch.num_warps,
        "grf asked": row.launch.grf or "",
    }
    if "error" in row.result:
        reason = row.result["error"].strip().splitlines()[-1][:120]
        yield {**cells, "products": f"does not compile: {reason}"}
        return
    for device, code in row.result["devices"].items():
        yield {
            **cells,
            "device": device,
            **figures(code),
            **rates(row, device),
            "products": products(row),
        }


def _worst(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """The most spill and the longest loop of each op, in the rows that compile."""
    worst: dict[str, tuple[int, int]] = {}
    for row in rows:
        for code in row.result.get("devices", {}).values():
            spill, loop = worst.get(row.op, (0, 0))
            of = figures(code)
            worst[row.op] = max(spill, of["spill"]), max(loop, of["loop"])
    return {op: (f"{spill:,}", f"{loop:,}") for op, (spill, loop) in worst.items()}


def _by_name(row: Row) -> dict[str, list[int]]:
    """Each figure's values, one per device."""
    codes = [figures(code) for code in row.result["devices"].values()]
    return {name: [code[name] for code in codes] for name in codes[0]}


def _calls(row: Row) -> str:
    """The first call, and how many more launch the same code."""
    more = len(row.calls) - 1
    return row.calls[0] + (f" and {more} more" if more else "")
