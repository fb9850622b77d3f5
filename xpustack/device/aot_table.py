# SPDX-License-Identifier: Apache-2.0
"""What Intel's compiler made ahead of time: the rows of `python -m aot --docs`."""

from dataclasses import dataclass
from pathlib import Path

from xpustack.core.rows import read_rows

ROWS = "docs/data/machine_code.csv"
OURS = "This stack"


@dataclass(frozen=True)
class Compiled:
    """All rows of one kernel with one launch: the most of each figure."""

    kernel: str
    warps: int
    grf: str
    spill: int
    dpas: int


def read(root: Path) -> dict[tuple[str, int, str], Compiled]:
    """The rows by kernel, warps and GRF mode asked for; none without the file."""
    found: dict[tuple[str, int, str], Compiled] = {}
    for row in read_rows(root / ROWS):
        if row["by"] != OURS or not row["device"]:
            continue
        key = (row["kernel"], int(row["warps"]), row["grf asked"])
        old = found.get(key, Compiled(*key, 0, 0))
        spill, dpas = int(row["spill"]), int(row["dpas"])
        found[key] = Compiled(*key, max(old.spill, spill), max(old.dpas, dpas))
    return found
