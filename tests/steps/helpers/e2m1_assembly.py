# SPDX-License-Identifier: Apache-2.0
"""Emulates, for Triton's interpreter, the only inline assembly in the shared ops.

`cvt.rn.satfinite.e2m1x2.f32` rounds two fp32 values to e2m1, ties to even, and packs
the first operand into the high nibble. A device that has it runs it itself.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

interpreter = importlib.import_module("triton.runtime.interpreter")
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def codes(x: np.ndarray) -> np.ndarray:
    """e2m1 codes, 4 bits each, of fp32 values."""
    midpoints = (VALUES[1:] + VALUES[:-1]) / 2
    magnitude = np.abs(x).astype(np.float64)
    below = np.searchsorted(midpoints, magnitude, side="left")
    tie = (below < 7) & (magnitude == midpoints[np.minimum(below, 6)])
    return below + (tie & (below % 2 == 1)) + 8 * np.signbit(x)


@contextmanager
def interpreted() -> Iterator[None]:
    """Make the interpreter emulate that instruction."""

    def create_inline_asm(
        self: Any, assembly: str, constraints: str, values: Any, *rest: Any
    ) -> Any:
        assert "cvt.rn.satfinite.e2m1x2.f32" in assembly, assembly
        high, low = (codes(value.data) for value in values)
        packed = (high << 4 | low).astype(np.uint32)
        handle = interpreter.TensorHandle(packed, interpreter.tl.uint32)
        return SimpleNamespace(get_result=lambda index: handle)

    with pytest.MonkeyPatch.context() as patch:
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "create_inline_asm", create_inline_asm, raising=False)
        yield
