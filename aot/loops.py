# SPDX-License-Identifier: Apache-2.0
"""Find the loops of a kernel in its disassembly, and count what one turn executes.

A loop is the code between a label and a later jump back to it. Intel's compiler lays
loops out contiguously, so the lines between are its body; code that a branch of the
body skips is counted too, as if every branch were taken.
"""

import re
from collections import Counter
from dataclasses import dataclass

_LABEL = re.compile(r"(\w+):")
_OPERATION = re.compile(r"\s*(?:\([^)]*\)\s*){0,2}([a-z][\w.]*)\s*(?:\(|\s)")
_JUMPS = ("jmpi", "while", "goto", "brd", "brc")
_NARROW = re.compile(r"load\.slm\.d(?:8|16)(?:u32)?\b")


@dataclass(frozen=True)
class Loop:
    """One loop of one kernel's machine code, with the loops inside it.

    Attributes:
        instructions: instructions of one turn per hardware thread.
        dpas: matrix instructions among them.
        sends: memory and message instructions among them.
        narrow_loads: loads of one 8-bit or 16-bit value a lane from shared local
            memory among the sends: an operand that is put together value by value.
    """

    instructions: int
    dpas: int
    sends: int
    narrow_loads: int


def loops(listing: str) -> tuple[Loop, ...]:
    """The loops of a listing by `ocloc disasm`, the longest first."""
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    ends: dict[int, int] = {}
    for text in listing.splitlines():
        if label := _LABEL.fullmatch(text.strip()):
            labels[label[1]] = len(lines)
            continue
        operation = _OPERATION.match(text)
        if operation is None:
            continue
        lines.append((operation[1], text))
        if operation[1].split(".")[0] in _JUMPS:
            for word in re.findall(r"\w+", text):
                if word in labels:
                    ends[labels[word]] = len(lines)
    spans = [_count(lines[first:end]) for first, end in ends.items()]
    return tuple(sorted(spans, key=lambda loop: -loop.instructions))


def _count(body: list[tuple[str, str]]) -> Loop:
    kinds = Counter(name.split(".")[0] for name, _ in body)
    return Loop(
        instructions=len(body),
        dpas=kinds["dpas"] + kinds["dpasw"],
        sends=kinds["send"] + kinds["sends"] + kinds["sendc"],
        narrow_loads=sum(
            name.startswith("send") and _NARROW.search(text) is not None
            for name, text in body
        ),
    )
