# SPDX-License-Identifier: Apache-2.0
"""Reading and editing SPIR-V, on modules of a few words."""

import struct

import pytest

from lab.lowered import spirv

HEADER = (0x07230203, 0x00010400, 0, 10, 0)


def text(value: str) -> tuple[int, ...]:
    """A literal string as words."""
    raw = value.encode() + b"\0"
    raw += b"\0" * (-len(raw) % 4)
    return struct.unpack(f"<{len(raw) // 4}I", raw)


def module(*items: tuple[int, ...]) -> bytes:
    """A module of instructions, each an opcode and its operands."""
    words = list(HEADER)
    for opcode, *operands in items:
        words += [(len(operands) + 1) << 16 | opcode, *operands]
    return struct.pack(f"<{len(words)}I", *words)


CAPABILITY = (spirv.OP_CAPABILITY, 6)
BARRIER = (spirv.OP_CONTROL_BARRIER, 1, 2, 3)


def test_kernel_attributes_go_and_nothing_else() -> None:
    odd = module(
        CAPABILITY,
        (spirv.OP_CAPABILITY, spirv.KERNEL_ATTRIBUTES),
        (spirv.OP_EXTENSION, *text(spirv.EXTENSION)),
        (spirv.OP_EXTENSION, *text("SPV_KHR_expect_assume")),
        (spirv.OP_EXECUTION_MODE, 4, 5893, 64, 1, 1),
        (spirv.OP_EXECUTION_MODE, 4, 35, 16),
        BARRIER,
    )
    plain = module(
        CAPABILITY,
        (spirv.OP_EXTENSION, *text("SPV_KHR_expect_assume")),
        (spirv.OP_EXECUTION_MODE, 4, 35, 16),
        BARRIER,
    )
    assert spirv.without_kernel_attributes(odd) == plain
    assert spirv.without_barriers(plain) == module(
        CAPABILITY,
        (spirv.OP_EXTENSION, *text("SPV_KHR_expect_assume")),
        (spirv.OP_EXECUTION_MODE, 4, 35, 16),
    )


def test_imports_are_named() -> None:
    decorate = (spirv.OP_DECORATE, 7, spirv.LINKAGE)
    binary = module(
        (*decorate, *text("_Z4madd"), spirv.IMPORT),
        (*decorate, *text("_kernel"), 0),
        (spirv.OP_DECORATE, 8, 1),
    )
    assert spirv.imports(binary) == {"_Z4madd"}


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="no SPIR-V"):
        list(spirv.instructions(b"\0" * 20))


def test_a_masked_load_loads_always() -> None:
    def masked(condition: int, *constants: tuple[int, ...]) -> bytes:
        return module(
            (spirv.OP_TYPE_BOOL, 1),
            *constants,
            (spirv.OP_FUNCTION, 2, 3, 0, 4),
            (spirv.OP_LABEL, 5),
            (spirv.OP_BRANCH_CONDITIONAL, condition, 6, 7),
            (spirv.OP_LABEL, 6),
            (spirv.OP_LOAD, 2, 8, 9),
            (spirv.OP_BRANCH, 7),
            (spirv.OP_LABEL, 7),
            # A loop is none.
            (spirv.OP_BRANCH_CONDITIONAL, condition, 5, 7),
        )

    before = masked(4)
    after = bytearray(spirv.without_load_masks(before))
    first_branch = masked(4, (spirv.OP_CONSTANT_TRUE, 1, 10))
    assert struct.unpack_from("<I", after, 12) == (11,)
    struct.pack_into("<I", after, 12, 10)
    differing = [
        n
        for n in range(0, len(after), 4)
        if after[n : n + 4] != first_branch[n : n + 4]
    ]
    assert len(after) == len(first_branch)
    assert [struct.unpack_from("<I", after, n)[0] for n in differing] == [10]
    with pytest.raises(ValueError, match="no masked load"):
        spirv.without_load_masks(module((spirv.OP_TYPE_BOOL, 1)))
