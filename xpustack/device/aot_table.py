# SPDX-License-Identifier: Apache-2.0
"""What Intel's compiler made ahead of time: the rows of docs/kernels.md."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = "docs/kernels.md"
TITLE = "#### This stack"


@dataclass(frozen=True)
class Compiled:
    """All rows of one kernel with one launch: the most of each figure."""

    kernel: str
    warps: int
    grf: str
    spill: int
    dpas: int


def read(root: Path) -> dict[tuple[str, int, str], Compiled]:
    """The rows by kernel, warps and GRF mode asked for; none without the page."""
    page = root / PAGE
    if not page.is_file():
        return {}
    _, _, text = page.read_text("utf-8").partition(TITLE)
    found: dict[tuple[str, int, str], Compiled] = {}
    for line in text.partition("<!--")[0].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) < 10 or not cells[1].startswith("`") or not cells[3].isdigit():
            continue
        key = (cells[1].strip("`"), int(cells[3]), "" if cells[4] == "-" else cells[4])
        old = found.get(key, Compiled(*key, 0, 0))
        found[key] = Compiled(
            *key, max(old.spill, _most(cells[5])), max(old.dpas, _most(cells[9]))
        )
    return found


def _most(cell: str) -> int:
    """The largest of the figures that stand for several devices."""
    return max((int(number) for number in re.findall(r"\d+", cell)), default=0)
