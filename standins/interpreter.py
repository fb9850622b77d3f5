# SPDX-License-Identifier: Apache-2.0
"""Repair of Triton's CPU interpreter (3.6 to 3.9) for bfloat16, FP8 and NaN.

The interpreter keeps such numbers as bit patterns in unsigned numpy arrays and computes
with the patterns: a product of two bfloat16 tiles multiplies integers. Its conversions
lose the carry of rounding, do not saturate and decode NaN as a number. `repair` makes
torch do the conversions, and float32 the arithmetic. Its minimum and maximum give NaN
where a GPU's give the other operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_TORCH: dict[str, torch.dtype] = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_CODES = ("fp8e4nv", "fp8e5")
_BITS = {
    "fp8e4nv": torch.uint8,
    "fp8e5": torch.uint8,
    "bf16": torch.uint16,
    "fp16": torch.uint16,
    "fp32": torch.uint32,
}
_AS_BITS = ("fp8e4nv", "fp8e5", "bf16")
_UNSIGNED = frozenset({"B", "H"})
"""numpy's characters of uint8 and uint16."""
_E4M3_MAX = 448.0
_MARK = "_repaired_by_xpu_dsv4"


def repair() -> None:
    """Make the interpreter compute with bfloat16, e4m3 and e5m2 as a GPU does.

    - A conversion rounds to nearest even, as torch's cast does, and NaN stays NaN. e4m3
      saturates at 448, as Triton's compiled casts do. The interpreter still does the
      conversions that name another rounding mode.
    - A dot product multiplies in float32.
    - Element-wise arithmetic is done in float32 and rounded once.
    - The minimum and the maximum of NaN and a number are the number, unless the caller
      asks for NaN.
    - A bool may be an argument that is not compiled in.

    A second call does nothing. Compiled kernels are not affected.
    """
    if getattr(interpreter, _MARK, False):
        return
    convert: Callable[..., np.ndarray] = interpreter._convert_float
    interpreter._convert_float = functools.partial(_convert, convert)

    interpreter._implicit_cvt = _argument(interpreter._implicit_cvt)

    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot(builder.create_dot)
    builder.cast_impl = _cast(builder.cast_impl)
    for name in ("binary_op", "unary_op", "create_fma"):
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    setattr(interpreter, _MARK, True)


def _argument(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The original stores a bool of one bit as an int32, and refuses that."""

    def converted(value: Any) -> Any:
        if isinstance(value, bool):
            handle = interpreter.TensorHandle(np.array([value]), tl.int1)
            return tl.tensor(handle, tl.int1)
        return convert(value)

    return converted


def round_to(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert floating point numbers that are kept as bit patterns.

    Args:
        values (np.ndarray):
            Numbers of format `source`, of any shape and any numpy dtype of that width.
        source (str):
            Triton's name of the format, a key of `_TORCH`.
        target (str):
            Triton's name of the format to convert to.

    Returns:
        Bit patterns of the same shape: unsigned integers of the width of `target`.
    """
    if values.size > 1 and not any(values.strides):
        number = round_to(values[(0,) * values.ndim].reshape(1), source, target)
        repeated: np.ndarray = np.broadcast_to(number, values.shape)
        return repeated
    if (source, target) == ("bf16", "fp32"):
        wide: np.ndarray = values.view(np.uint16).astype(np.uint32, order="C")
        np.left_shift(wide, 16, out=wide)
        return wide
    if source in _CODES:
        codes: np.ndarray = _every_code(source, target)[values.view(np.uint8)]
        return codes
    bits = np.require(values, requirements=["C", "W"])
    numbers = torch.from_numpy(bits).view(_TORCH[source])
    if target == "fp8e4nv":
        numbers = numbers.float().clamp(-_E4M3_MAX, _E4M3_MAX)
    rounded: np.ndarray = numbers.to(_TORCH[target]).view(_BITS[target]).numpy()
    return rounded


@functools.cache
def _every_code(source: str, target: str) -> np.ndarray:
    """What each of a format's 256 codes becomes in another format."""
    codes = torch.arange(256, dtype=torch.uint8).view(_TORCH[source])
    return round_to(codes.float().numpy(), "fp32", target)


def _convert(
    original: Callable[..., np.ndarray],
    values: np.ndarray,
    source: Any,
    target: Any,
    rounding_mode: Any,
) -> np.ndarray:
    """In place of the interpreter's `_convert_float`, which is `original`."""
    nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
    if nearest and source.name in _TORCH and target.name in _TORCH:
        return round_to(values, source.name, target.name)
    return original(values, source, target, rounding_mode)


def _holds_bits(handle: Any) -> bool:
    """Whether a tensor's numbers are bfloat16 or FP8, kept as bit patterns."""
    return (
        type(handle) is interpreter.TensorHandle
        and handle.data.dtype.char in _UNSIGNED
        and handle.dtype.scalar.name in _AS_BITS
    )


def _widen(handle: Any) -> Any:
    """A tensor of bit patterns as float32; anything else as it is."""
    if not _holds_bits(handle):
        return handle
    bits = round_to(handle.data, handle.dtype.scalar.name, "fp32")
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _narrow(handle: Any, dtype: Any) -> Any:
    """A tensor of numbers rounded to `dtype`, as bit patterns; booleans as they are."""
    if handle.data.dtype == np.bool_:
        return handle
    numbers = handle.data.astype(np.float32, copy=False)
    return interpreter.TensorHandle(round_to(numbers, "fp32", dtype.name), dtype)


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    """`create_dot` with float32 operands."""

    @functools.wraps(original)
    def create_dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        return original(self, _widen(a), _widen(b), acc, *options)

    return create_dot


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    """`cast_impl` with float32 between a format of bit patterns and any other."""

    @functools.wraps(original)
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if target.name not in _AS_BITS and not _holds_bits(src):
            # What the original does, without asking whether a format is bfloat16.
            numbers = src.data.astype(interpreter._get_np_dtype(dst_type))
            return interpreter.TensorHandle(numbers, target)
        wide = original(self, _widen(src), tl.float32)
        return (
            _narrow(wide, target)
            if target.name in _AS_BITS
            else original(self, wide, dst_type)
        )

    return cast_impl


def _in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on numbers that is done in float32 and rounded to its operands."""

    @functools.wraps(original)
    def compute(self: Any, *operands: Any) -> Any:
        for handle in operands:
            if _holds_bits(handle):
                break
        else:
            return original(self, *operands)
        result = original(self, *(_widen(operand) for operand in operands))
        return _narrow(result, handle.dtype.scalar)

    return compute
