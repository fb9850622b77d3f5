# SPDX-License-Identifier: Apache-2.0
"""Read a kernel's resources and instruction counts from the output of ocloc disasm."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from lab.aot.compiler.loops import Work, work


@dataclass(frozen=True)
class Machine:
    """Resources of one kernel's machine code on one device.

    Attributes:
        spill: bytes of scratch memory per hardware thread for spilled registers.
        private: bytes of scratch memory per hardware thread for private arrays.
        grf: registers per hardware thread.
        simd: lanes per instruction.
        barriers: named barriers.
        total: what the whole listing executes once.
        loop: what one iteration of the longest loop executes; nothing without a loop.
        around: what an iteration of a loop that repeats that one executes besides.
    """

    spill: int
    private: int
    grf: int
    simd: int
    barriers: int
    total: Work
    loop: Work
    around: Work = field(default_factory=Work)


def read(folder: Path, kernel: str) -> Machine:
    """Parse a folder that `ocloc disasm -dump` wrote.

    Args:
        folder: holds `.ze_info` and one `.text.<kernel>.asm`.
        kernel: name of the kernel.

    Raises:
        ValueError: the folder holds no such kernel.
    """
    info = (folder / ".ze_info").read_text()
    block = re.search(
        rf"- name:\s+'?{re.escape(kernel)}'?\n(.*?)(?=\n  - name:|\n\w|\Z)", info, re.S
    )
    if block is None:
        raise ValueError(f"{folder / '.ze_info'} names no kernel {kernel}")
    text = block[1]
    scratch = {
        usage: int(size)
        for usage, size in re.findall(
            r"type:\s+scratch\s+usage:\s+(\w+)\s+size:\s+(\d+)", text
        )
    }
    listing = (folder / f".text.{kernel}.asm").read_text()
    total, turns, around = work(listing)
    return Machine(
        spill=max(_number(text, "spill_size"), scratch.get("spill_fill_space", 0)),
        private=_number(text, "private_size") or scratch.get("private_space", 0),
        grf=_number(text, "grf_count"),
        simd=_number(text, "simd_size"),
        barriers=_number(text, "barrier_count"),
        total=total,
        loop=turns[0] if turns else Work(),
        around=around,
    )


def _number(text: str, field: str) -> int:
    match = re.search(rf"\b{field}:\s+(\d+)", text)
    return int(match[1]) if match else 0
