# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Interleaved rotary embedding on bf16 pairs held as 32-bit words.

Interleaved RoPE rotates the pairs (x[2i], x[2i+1]), and such a pair is one aligned
32-bit word of a bf16 row. Working on words keeps loads and stores contiguous and needs
no exchange between lanes. The lane that loads a word is the only one that stores it,
so a kernel may write in place. The kernels' functions here are element-wise.

Source: RoFormer, arXiv:2104.09864, with cosines and sines from the model's table.
"""

import torch

from ._checks import check_dtype, check_inner_contiguous, fail
from ._triton import tl, triton


def check_pair_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor` is bf16 and each of its rows starts on a 32-bit word."""
    check_dtype(name, tensor, torch.bfloat16)
    check_inner_contiguous(name, tensor)
    odd = any(
        size > 1 and stride % 2
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
    if odd:
        fail(f"{name}.stride()", tuple(tensor.stride()), "even strides between rows")
    if tensor.storage_offset() % 2:
        fail(f"{name}.storage_offset()", tensor.storage_offset(), "an even number")


def check_rotary(
    positions: torch.Tensor, cos_sin_cache: torch.Tensor, tokens: int, rope_dim: int
) -> None:
    """Raise unless positions are `[tokens]` and the table is `[*, rope_dim]`."""
    check_dtype("positions", positions, torch.int64, torch.int32)
    if positions.dim() != 1 or positions.shape[0] != tokens:
        fail("positions.shape", list(positions.shape), f"[{tokens}]")
    check_inner_contiguous("positions", positions)
    check_dtype("cos_sin_cache", cos_sin_cache, torch.float32, torch.bfloat16)
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != rope_dim:
        fail("cos_sin_cache.shape", list(cos_sin_cache.shape), f"[*, {rope_dim}]")
    check_inner_contiguous("cos_sin_cache", cos_sin_cache)


@triton.jit
def unpack_bf16(word):
    """The two bf16 values of an int32 word as fp32: (low half, high half)."""
    HIGH_HALF: tl.constexpr = -0x10000
    even = (word << 16).to(tl.float32, bitcast=True)
    odd = (word & HIGH_HALF).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def round_to_bf16(x):
    """fp32 `x` rounded to bf16, a tie to even, and still fp32.

    For triton-xpu, seen in 3.3: it drops a conversion to bf16 that one back to fp32
    follows, and nothing is rounded.
    """
    HIGH_HALF: tl.constexpr = -0x10000
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & HIGH_HALF
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def pack_bf16(even, odd):
    """The int32 word of two fp32 values, each rounded once to bf16."""
    LOW_HALF: tl.constexpr = 0xFFFF
    low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    high = odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return (low & LOW_HALF) | (high << 16)


@triton.jit
def load_rotation(
    cos_sin_ptr,
    row_stride,
    position,
    max_position,
    pair,
    in_rope,
    HALF_ROPE: tl.constexpr,
):
    """Cosine and sine for `pair` at `position` in fp32.

    They are 1 and 0 outside the table and where `in_rope` is false: no rotation. A row
    of the table holds HALF_ROPE cosines, then HALF_ROPE sines.
    """
    in_table = in_rope & (position >= 0) & (position < max_position)
    row_ptr = cos_sin_ptr + position * row_stride
    cos = tl.load(row_ptr + pair, mask=in_table, other=1.0).to(tl.float32)
    sin = tl.load(row_ptr + HALF_ROPE + pair, mask=in_table, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def rotate(even, odd, cos, sin, in_rope):
    """Rotate a pair by +angle where `in_rope` is true; else keep its bits."""
    rotated_even = even * cos - odd * sin
    rotated_odd = even * sin + odd * cos
    even = tl.where(in_rope, rotated_even, even)
    odd = tl.where(in_rope, rotated_odd, odd)
    return even, odd
