# SPDX-License-Identifier: Apache-2.0
"""Reads and edits SPIR-V: removes what Intel's CPU runtime refuses, lists imports, and
plants faults."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HEADER_WORDS = 5
OP_EXTENSION, OP_EXECUTION_MODE, OP_CAPABILITY, OP_DECORATE = 10, 16, 17, 71
OP_CONTROL_BARRIER = 224
OP_TYPE_BOOL, OP_CONSTANT_TRUE, OP_FUNCTION, OP_LOAD = 20, 41, 54, 61
OP_LABEL, OP_BRANCH, OP_BRANCH_CONDITIONAL = 248, 249, 250
KERNEL_ATTRIBUTES = 5892
"""Capability KernelAttributesINTEL; 5893 to 5896 are its execution modes."""
MODES = range(5893, 5897)
EXTENSION = "SPV_INTEL_kernel_attributes"
LINKAGE, IMPORT = 41, 1


@dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode, and all its words, the first included."""

    opcode: int
    words: tuple[int, ...]


def instructions(binary: bytes) -> Iterator[Instruction]:
    """The instructions of a module.

    Raises:
        ValueError: it is no SPIR-V.
    """
    words = struct.unpack(f"<{len(binary) // 4}I", binary)
    if len(words) < HEADER_WORDS or words[0] != 0x07230203:
        raise ValueError("no SPIR-V module")
    place = HEADER_WORDS
    while place < len(words):
        count, opcode = words[place] >> 16, words[place] & 0xFFFF
        yield Instruction(opcode, words[place : place + count])
        place += count


def text_of(words: tuple[int, ...]) -> str:
    """The literal string that starts with the first of `words`."""
    raw = struct.pack(f"<{len(words)}I", *words)
    return raw.partition(b"\0")[0].decode()


def without_kernel_attributes(binary: bytes) -> bytes:
    """The module without Intel's kernel attributes, for a GPU's compiler alone."""

    def unwanted(item: Instruction) -> bool:
        words = item.words
        return (
            (item.opcode == OP_CAPABILITY and words[1] == KERNEL_ATTRIBUTES)
            or (item.opcode == OP_EXECUTION_MODE and words[2] in MODES)
            or (item.opcode == OP_EXTENSION and text_of(words[1:]) == EXTENSION)
        )

    return without(binary, unwanted)


def without_barriers(binary: bytes) -> bytes:
    """The module without barriers of a work-group: a fault to plant."""
    return without(binary, lambda item: item.opcode == OP_CONTROL_BARRIER)


def without_load_masks(binary: bytes) -> bytes:
    """The module that loads where a mask forbids it: a fault to plant.

    Triton makes of a masked load a branch around a block with the load; here its
    condition is the constant true.

    Raises:
        ValueError: the module has no masked load.
    """
    items = list(instructions(binary))
    labels = {
        item.words[1]: n for n, item in enumerate(items) if item.opcode == OP_LABEL
    }
    header = list(struct.unpack(f"<{HEADER_WORDS}I", binary[: 4 * HEADER_WORDS]))
    true = header[3]
    header[3] += 1
    boolean = next(item.words[1] for item in items if item.opcode == OP_TYPE_BOOL)
    constant: tuple[int, ...] = (3 << 16 | OP_CONSTANT_TRUE, boolean, true)
    found = 0
    words = header
    for item in items:
        if item.opcode == OP_FUNCTION and constant:
            words += constant
            constant = ()
        if item.opcode == OP_BRANCH_CONDITIONAL and _skips_load(item, items, labels):
            words += (item.words[0], true, *item.words[2:])
            found += 1
        else:
            words += item.words
    if not found:
        raise ValueError("no masked load")
    return struct.pack(f"<{len(words)}I", *words)


def _skips_load(
    branch: Instruction, items: list[Instruction], labels: dict[int, int]
) -> bool:
    """Whether a branch goes to its other label, at once or past a load."""
    _, _, yes, no = branch.words[:4]
    loads = False
    for item in items[labels[yes] + 1 :]:
        if item.opcode in (OP_LABEL, OP_BRANCH_CONDITIONAL):
            return False
        if item.opcode == OP_BRANCH:
            return loads and item.words[1] == no
        loads |= item.opcode == OP_LOAD
    return False


def without(binary: bytes, unwanted: Callable[[Instruction], bool]) -> bytes:
    """The module without the instructions that are not wanted."""
    kept = list(struct.unpack(f"<{HEADER_WORDS}I", binary[: 4 * HEADER_WORDS]))
    for item in instructions(binary):
        if not unwanted(item):
            kept += item.words
    return struct.pack(f"<{len(kept)}I", *kept)


def imports(binary: bytes) -> set[str]:
    """Names of the functions that a module imports."""
    return {
        text_of(item.words[3:-1])
        for item in instructions(binary)
        if item.opcode == OP_DECORATE
        and item.words[2] == LINKAGE
        and item.words[-1] == IMPORT
    }
