# SPDX-License-Identifier: Apache-2.0
"""Find the loops of a kernel in its disassembly, and count what one iteration executes.

A loop is the code between a label and a later jump back to it. Intel's compiler lays
loops out contiguously, so the lines between are its body; code that a branch of the
body skips is counted too, as if every branch were taken. One kind of branch is left
out, of loops that multiply matrices: of two arms between which all lanes choose alike,
and which neither multiply nor read global memory, the longer one. That is attention's
rescaling, which is rare.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

LANES = 16
"""32-bit values that a vector engine of Xe-HPC, Xe2 and Xe3 computes per clock."""
REGISTER = 64
"""Bytes of a register, the unit in which messages move data."""
_LABEL = re.compile(r"(\w+):")
_OPERATION = re.compile(
    r"\s*(?:\([^)]*\)\s*){0,2}([a-z][\w.]*)\s*(?:\((\d+)\|M\d+\)|\(|\s)"
)
_WIDE = re.compile(r"<[\d;,]+>:(?:q|uq|df)\b")
_UNIFORM = re.compile(r"\s*\(W(&)?[^)]*\)\s*jmpi\s+(\w+)")
_JUMPS = ("jmpi", "while", "goto", "brd", "brc")
_SENDS = ("send", "sends", "sendc")
_NARROW = re.compile(r"load\.slm\.d(?:8|16)(?:u32)?\b")
_MESSAGE = re.compile(
    r"wr:(\d+)\+(\d+), rd:(\d+); (?:load|store|atomic)\w*\.(slm|ugm)\b"
)


@dataclass(frozen=True)
class Work:
    """What a hardware thread executes: in one iteration of a loop, or in a whole
    listing.

    Attributes:
        instructions: instructions of any kind.
        cycles: clocks to issue them, one per 16 lanes of 32 bits.
        math: clocks of the extended-math unit, which computes four lanes per clock.
        dpas: matrix instructions.
        sends: memory and message instructions.
        narrow_loads: loads of one 8-bit or 16-bit value per lane from shared local
            memory among the sends: an operand that is put together value by value.
        slm: bytes that messages to shared local memory move.
        memory: bytes that messages to global or scratch memory move.
        barriers: waits for the other sub-groups.
        rare: instructions of arms that are left out of all the other figures of a loop.
    """

    instructions: int = 0
    cycles: int = 0
    math: int = 0
    dpas: int = 0
    sends: int = 0
    narrow_loads: int = 0
    slm: int = 0
    memory: int = 0
    barriers: int = 0
    rare: int = 0


@dataclass(frozen=True)
class _Instruction:
    name: str
    lanes: int
    text: str


def work(listing: str) -> tuple[Work, tuple[Work, ...], Work]:
    """Of a listing by `ocloc disasm`: all of it, its loops, the longest first, and what
    an iteration of a loop around the first of them executes besides.

    A loop around another that has all of its matrix instructions only repeats that one,
    and is no loop of its own. Nothing is around the others.
    """
    labels: dict[str, int] = {}
    code: list[_Instruction] = []
    ends: dict[int, int] = {}
    uniform: dict[int, tuple[str, bool]] = {}
    for text in listing.splitlines():
        if label := _LABEL.fullmatch(text.strip()):
            labels[label[1]] = len(code)
            continue
        operation = _OPERATION.match(text)
        if operation is None:
            continue
        name = operation[1].split(".")[0]
        code.append(_Instruction(operation[1], int(operation[2] or 1), text))
        if jump := _UNIFORM.match(text):
            uniform[len(code) - 1] = jump[2], jump[1] is not None
        if name in _JUMPS:
            for word in re.findall(r"\w+", text):
                if word in labels:
                    ends[labels[word]] = len(code)
    rare = list(_rare_arms(code, labels, uniform))
    turns: dict[range, Work] = {}
    for first, end in ends.items():
        multiplies = any(_is_dpas(item) for item in code[first:end])
        arms = [
            arm for arm in rare if multiplies and first <= arm.start and arm.stop <= end
        ]
        left_out = {i for arm in arms for i in arm}
        body = [code[i] for i in range(first, end) if i not in left_out]
        turns[range(first, end)] = replace(_count(body), rare=len(left_out))
    outer = {
        inside: around
        for around, inside in itertools.permutations(turns, 2)
        if around.start <= inside.start and inside.stop <= around.stop
        if turns[around].dpas == turns[inside].dpas > 0
    }
    own = sorted(
        (body for body in turns if body not in outer.values()),
        key=lambda body: -turns[body].instructions,
    )
    besides = Work()
    if own and own[0] in outer:
        besides = _less(turns[outer[own[0]]], turns[own[0]])
    return _count(code), tuple(turns[body] for body in own), besides


def _less(whole: Work, part: Work) -> Work:
    return Work(
        **{
            name: getattr(whole, name) - getattr(part, name)
            for name in Work.__dataclass_fields__
        }
    )


def _rare_arms(
    code: list[_Instruction],
    labels: dict[str, int],
    uniform: dict[int, tuple[str, bool]],
) -> Iterator[range]:
    """The longer arms of uniform branches that only compute.

    A conditional jump leads to the second arm; in front of that the first arm ends with
    a jump over it.
    """
    for at, (label, conditional) in uniform.items():
        second = labels.get(label, 0)
        over, otherwise = uniform.get(second - 1, ("", True))
        end = labels.get(over, 0)
        if not conditional or otherwise or not at < second - 1 < second < end:
            continue
        arms = range(at + 1, second), range(second, end)
        if not any(_works(code[i]) for arm in arms for i in arm):
            yield max(arms, key=len)


def _works(item: _Instruction) -> bool:
    """Whether it multiplies matrices or moves data from or to global memory."""
    message = _MESSAGE.search(item.text)
    return _is_dpas(item) or bool(message and message[4] == "ugm")


def _is_dpas(item: _Instruction) -> bool:
    return item.name.split(".")[0] in ("dpas", "dpasw")


def _count(code: list[_Instruction]) -> Work:
    total = dict.fromkeys(Work.__dataclass_fields__, 0)
    for item in code:
        total["instructions"] += 1
        kind = item.name.split(".")[0]
        if kind in _SENDS:
            total["sends"] += 1
            total["cycles"] += 1
            total["narrow_loads"] += _NARROW.search(item.text) is not None
            if message := _MESSAGE.search(item.text):
                moved = (int(message[2]) + int(message[3])) * REGISTER
                total["slm" if message[4] == "slm" else "memory"] += moved
        elif _is_dpas(item):
            total["dpas"] += 1
            total["cycles"] += 1
        else:
            values = item.lanes * (2 if _WIDE.search(item.text) else 1)
            total["cycles"] += max(-(-values // LANES), 1)
            total["barriers"] += item.name == "sync.bar"
            if kind == "math":
                total["math"] += max(-(-item.lanes * 4 // LANES), 1)
    return Work(**total)
