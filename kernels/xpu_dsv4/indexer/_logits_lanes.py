# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""e4m3 operands of the indexer's scores as a sub-group of an Intel GPU takes them.

A key is a row of the product, and the lanes of a sub-group share its dims: what each
loads is its part of the left operand. triton-xpu 3.3 gives a lane the bytes along the
contiguous axis, then lanes and sub-groups to the axes in front, in their order; where
these are the axes of the operand, nothing goes through shared local memory.
"""

from .._fp8 import E4M3_SHIFT, e4m3_shifted
from .._triton import tl, triton

LANES = 16
"""Lanes of a sub-group."""


@triton.jit
def e4m3_to_bf16(code, E4M3_SHIFT: tl.constexpr = E4M3_SHIFT):
    """The bf16 value of a uint8 e4m3 code. Element-wise."""
    return (e4m3_shifted(code) * 2.0**E4M3_SHIFT).to(tl.bfloat16)


@triton.jit
def _lane_halves(
    code_ptrs,  # [..., DIM / 2 / LANES]
    HALF: tl.constexpr,
):
    """Both halves of the dims of vectors, in the shape of `code_ptrs`, bf16, where a
    lane reads HALF bytes in a row for each."""
    return e4m3_to_bf16(tl.load(code_ptrs)), e4m3_to_bf16(tl.load(code_ptrs + HALF))


@triton.jit
def lane_query(
    q_ptr,
    weights_ptr,
    first_head,
    num_heads,
    q_head_stride,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr = LANES,
):
    """As `_query` of `_logits_kernels`, from `first_head` on, with the dims in the
    order of `lane_keys`.

    Heads that do not exist are the codes of the first without a weight: a load with a
    mask is a branch, and no product overflows.
    """
    HALF: tl.constexpr = DIM // 2 // LANES
    head_offs = first_head + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    weights = tl.load(weights_ptr + head_offs, mask=head_mask, other=0.0)  # [BLOCK_H]
    heads = tl.where(head_mask, head_offs, 0)[:, None, None]
    lane_offs = tl.arange(0, LANES)[None, :, None]
    byte_offs = lane_offs * (2 * HALF)
    # [BLOCK_H, LANES, HALF]
    code_ptrs = (
        q_ptr + heads * q_head_stride + (byte_offs + tl.arange(0, HALF)[None, None, :])
    )
    low, high = _lane_halves(code_ptrs, HALF)
    q0 = tl.reshape(tl.permute(low, (2, 1, 0)), (DIM // 2, BLOCK_H))
    q1 = tl.reshape(tl.permute(high, (2, 1, 0)), (DIM // 2, BLOCK_H))
    return q0, q1, weights


@triton.jit
def lane_keys(
    key_ptrs,  # [WARPS]
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr = LANES,
):
    """Both halves of the dims of keys, `[WARPS * ROWS, DIM / 2]` bf16 each, of which
    ROWS in a row lie at each pointer.

    A lane reads some bytes of each key of its sub-group: that is the left operand of a
    product as it is, and nothing goes through shared local memory. So dim `j * LANES +
    lane` of a half is that of the lane's byte `j`.
    """
    HALF: tl.constexpr = DIM // 2 // LANES
    lane_offs = tl.arange(0, LANES)[:, None, None, None]
    row_offs = tl.arange(0, ROWS)[None, None, :, None]
    # What is the same for all lanes comes last: it is then part of the load.
    lane_ptrs = key_ptrs[None, :, None, None] + lane_offs * (2 * HALF)
    byte_offs = row_offs * DIM + tl.arange(0, HALF)[None, None, None, :]
    code_ptrs = lane_ptrs + byte_offs  # [LANES, WARPS, ROWS, HALF]
    low, high = _lane_halves(code_ptrs, HALF)
    k0 = tl.reshape(tl.permute(low, (1, 2, 3, 0)), (WARPS * ROWS, DIM // 2))
    k1 = tl.reshape(tl.permute(high, (1, 2, 3, 0)), (WARPS * ROWS, DIM // 2))
    return k0, k1


@triton.jit
def lane_scores(
    q0,  # [DIM / 2, BLOCK_H] bf16, as all that begin with q
    q1,
    weights,  # [BLOCK_H]
    other_q0,
    other_q1,
    other_weights,  # [BLOCK_H]
    k0,  # [BLOCK_N, DIM / 2] bf16
    k1,  # [BLOCK_N, DIM / 2] bf16
):
    """As `_scores` of `_logits_kernels`, over two groups of heads, `[BLOCK_N]`.

    The second group's weighted products are added as they are multiplied.
    """
    products = tl.dot(k1, q1, tl.dot(k0, q0))  # [BLOCK_N, BLOCK_H]
    sums = tl.maximum(products, 0.0) * weights[None, :]  # [BLOCK_N, BLOCK_H]
    products = tl.dot(k1, other_q1, tl.dot(k0, other_q0))  # [BLOCK_N, BLOCK_H]
    factors = tl.broadcast_to(other_weights[None, :], products.shape)
    sums = tl.fma(tl.maximum(products, 0.0), factors, sums)  # [BLOCK_N, BLOCK_H]
    return tl.sum(sums, axis=1)
