# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of a block of heads over tiles of keys, accumulated dims first.

This is the form for Intel GPUs. A head's 512 dims are eight tiles of 64; Triton has no
arrays of tiles that a loop could index, so keys and accumulators have eight names each.
The accumulators hold the transpose, `[64, BLOCK_H]`: as the left operand of a product,
values are read from shared local memory 16 dims at a time, and as the right one value
by value. And triton-xpu would keep all of q in shared local memory, so each tile of it
is loaded where it is used.
"""

from .._pages import HEAD_DIM
from .._pairs import load_rotation, round_to_bf16
from .._softmax import exceeds_maximum, softmax_factor
from .._triton import tl, triton
from .._ue8m0 import e4m3_code, exponent_scale
from ._output import block_scale, first_blocks

TILE_DIM = 64
"""Dims of one tile."""


@triton.jit
def range_behind_loop(SIZE: tl.constexpr):
    """0 to SIZE - 1, `[SIZE]`, for what is stored behind the loop over keys.

    The compiler would take `tl.arange(0, SIZE)` from before the loop, with all that it
    computes from it, and the loop lacks the registers to hold it.
    """
    return tl.arange(SIZE, 2 * SIZE) - SIZE


@triton.jit
def query_pointers(
    q_ptr,
    head_offs,  # [BLOCK_H]
    first_head,
    num_heads,
    q_head_stride,
    BLOCK_H: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    TILE_DIM: tl.constexpr = TILE_DIM,
):
    """Pointers to the first tile of one token's q, `[BLOCK_H, 64]`.

    With Q_BLOCKS a block pointer: its tiles are loaded by 2-dim block loads, straight
    into the operand of a matrix instruction, and need aligned rows.
    """
    if Q_BLOCKS:
        q_ptrs = tl.make_block_ptr(
            q_ptr,
            shape=(num_heads, HEAD_DIM),
            strides=(q_head_stride, 1),
            offsets=(first_head, 0),
            block_shape=(BLOCK_H, TILE_DIM),
            order=(1, 0),
        )
    else:
        q_row_ptrs = q_ptr + head_offs.to(tl.int64) * q_head_stride  # [BLOCK_H]
        q_ptrs = q_row_ptrs[:, None] + tl.arange(0, TILE_DIM)[None, :]
    return q_ptrs


@triton.jit
def _add_scores(
    scores,  # [BLOCK_H, BLOCK_N] fp32
    q_ptrs,  # [BLOCK_H, 64]
    row_mask,  # [BLOCK_H, 1]
    k,  # [BLOCK_N, 64] bf16
    TILE: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    TILE_DIM: tl.constexpr = TILE_DIM,
):
    """`scores` plus the products of the dims of one tile; missing heads give 0."""
    if Q_BLOCKS:
        tile_ptr = tl.advance(q_ptrs, (0, TILE * TILE_DIM))  # [BLOCK_H, 64]
        q = tl.load(tile_ptr, boundary_check=(0,), padding_option="zero")
    else:
        q = tl.load(q_ptrs + TILE * TILE_DIM, mask=row_mask, other=0.0)
    return tl.dot(q, tl.trans(k), scores)


@triton.jit
def _add_values(
    acc,  # [64, BLOCK_H] fp32
    p,  # [BLOCK_N, BLOCK_H] bf16
    v,  # [BLOCK_N, 64] bf16
    start,
    last_key,
    TILE: tl.constexpr,
):
    """`acc` plus the transpose of the values that `p` weighs.

    The product stands behind a branch that is always taken. Where it shares a region
    with that of the scores, on which it depends, or with that of another tile,
    triton-xpu 3.3 gives every sub-group whole rows of the accumulator, and registers
    spill. It joins neighbours under one condition, so these take turns in its spelling.
    """
    keys_left = start < last_key if TILE % 2 == 0 else last_key > start
    if keys_left:
        acc = tl.dot(tl.trans(v), p, acc)
    return acc


@triton.jit
def zero_accumulator(BLOCK_H: tl.constexpr, TILE_DIM: tl.constexpr = TILE_DIM):
    """An empty accumulator of one tile of dims, `[64, BLOCK_H]`."""
    return tl.zeros([TILE_DIM, BLOCK_H], tl.float32)


@triton.jit
def attend(
    q_ptrs,  # [BLOCK_H, 64]
    row_mask,  # [BLOCK_H, 1]
    k0,  # [BLOCK_N, 64] bf16
    k1,  # [BLOCK_N, 64] bf16
    k2,  # [BLOCK_N, 64] bf16
    k3,  # [BLOCK_N, 64] bf16
    k4,  # [BLOCK_N, 64] bf16
    k5,  # [BLOCK_N, 64] bf16
    k6,  # [BLOCK_N, 64] bf16
    k7,  # [BLOCK_N, 64] bf16
    key_mask,  # [BLOCK_N]
    qk_scale,
    start,
    last_key,
    row_max,  # [BLOCK_H] fp32
    column_sums,  # [BLOCK_H, BLOCK_N] fp32
    acc0,  # [64, BLOCK_H] fp32
    acc1,  # [64, BLOCK_H] fp32
    acc2,  # [64, BLOCK_H] fp32
    acc3,  # [64, BLOCK_H] fp32
    acc4,  # [64, BLOCK_H] fp32
    acc5,  # [64, BLOCK_H] fp32
    acc6,  # [64, BLOCK_H] fp32
    acc7,  # [64, BLOCK_H] fp32
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
):
    """Take one tile of keys, which are the values as well, into the attention.

    The tile starts at key `start`, which is less than `last_key`. Only where a score
    exceeds the maximum by far, it is raised and everything before it is rescaled.
    The columns of the weights are summed apart, and added to each other once behind the
    loop: a lane has one column, and to add 16 lanes takes 9 instructions for each head.

    Returns:
        The maximum, the sums of the columns and the eight accumulators.

    """
    scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # [BLOCK_H, BLOCK_N]
    scores = _add_scores(scores, q_ptrs, row_mask, k0, 0, Q_BLOCKS)
    scores = _add_scores(scores, q_ptrs, row_mask, k1, 1, Q_BLOCKS)
    scores = _add_scores(scores, q_ptrs, row_mask, k2, 2, Q_BLOCKS)
    scores = _add_scores(scores, q_ptrs, row_mask, k3, 3, Q_BLOCKS)
    scores = _add_scores(scores, q_ptrs, row_mask, k4, 4, Q_BLOCKS)
    scores = _add_scores(scores, q_ptrs, row_mask, k5, 5, Q_BLOCKS)
    scores = _add_scores(scores, q_ptrs, row_mask, k6, 6, Q_BLOCKS)
    scores = _add_scores(scores, q_ptrs, row_mask, k7, 7, Q_BLOCKS)
    # [BLOCK_H, BLOCK_N]
    logits = tl.where(key_mask[None, :], scores * qk_scale, float("-inf"))
    if exceeds_maximum(logits, row_max):
        new_max = tl.maximum(row_max, tl.max(logits, 1))  # [BLOCK_H]
        rescale = tl.exp2(row_max - new_max)  # [BLOCK_H]
        row_max = new_max
        column_sums *= rescale[:, None]
        acc0 *= rescale[None, :]
        acc1 *= rescale[None, :]
        acc2 *= rescale[None, :]
        acc3 *= rescale[None, :]
        acc4 *= rescale[None, :]
        acc5 *= rescale[None, :]
        acc6 *= rescale[None, :]
        acc7 *= rescale[None, :]
    weights = tl.exp2(logits - row_max[:, None])  # [BLOCK_H, BLOCK_N]
    column_sums += weights
    p = tl.trans(weights.to(tl.bfloat16))  # [BLOCK_N, BLOCK_H]
    acc0 = _add_values(acc0, p, k0, start, last_key, 0)
    acc1 = _add_values(acc1, p, k1, start, last_key, 1)
    acc2 = _add_values(acc2, p, k2, start, last_key, 2)
    acc3 = _add_values(acc3, p, k3, start, last_key, 3)
    acc4 = _add_values(acc4, p, k4, start, last_key, 4)
    acc5 = _add_values(acc5, p, k5, start, last_key, 5)
    acc6 = _add_values(acc6, p, k6, start, last_key, 6)
    acc7 = _add_values(acc7, p, k7, start, last_key, 7)
    return row_max, column_sums, acc0, acc1, acc2, acc3, acc4, acc5, acc6, acc7


@triton.jit
def _store_tile(
    out_ptrs,  # [BLOCK_H, 64]
    acc,  # [64, BLOCK_H] fp32
    factor,  # [1, BLOCK_H] fp32
    row_mask,  # [BLOCK_H, 1]
):
    """Store an accumulator times `factor` in bf16.

    It is transposed in bf16: that moves half as many bytes through shared local memory.
    """
    out = tl.trans((acc * factor).to(tl.bfloat16))  # [BLOCK_H, 64]
    tl.store(out_ptrs, out, mask=row_mask)


@triton.jit
def _rounded(
    acc,  # [64, BLOCK_H] fp32
    factor,  # [1, BLOCK_H] fp32
):
    """An accumulator times `factor`, rounded to bf16 and still in fp32."""
    return round_to_bf16(acc * factor)


@triton.jit
def _rotate_tile_back(
    x,  # [64, BLOCK_H] fp32
    token,
    positions_ptr,
    cos_sin_ptr,
    max_position,
    cos_sin_stride,
    BLOCK_H: tl.constexpr,
    TILE_DIM: tl.constexpr = TILE_DIM,
):
    """The rotary tile of a block of heads, rotated back: `[64, BLOCK_H]` fp32."""
    dim_offs = range_behind_loop(TILE_DIM)[:, None]  # [64, 1]
    position = tl.load(positions_ptr + token).to(tl.int64)
    # [64, 1] each
    cos, sin = load_rotation(
        cos_sin_ptr,
        cos_sin_stride,
        position,
        max_position,
        dim_offs // 2,
        True,
        TILE_DIM // 2,
    )
    other_offs = tl.broadcast_to(dim_offs ^ 1, [TILE_DIM, BLOCK_H])  # [64, BLOCK_H]
    others = tl.gather(x, other_offs, 0)  # [64, BLOCK_H]
    return x * cos + others * tl.where(dim_offs % 2 == 0, sin, sin * -1.0)


@triton.jit
def _store_fp8_block(
    values_ptr,
    scales_ptr,
    block_offs,  # [BLOCK_H]
    low,  # [64, BLOCK_H] fp32
    high,  # [64, BLOCK_H] fp32
    head_mask,  # [BLOCK_H]
    TILE_DIM: tl.constexpr = TILE_DIM,
):
    """Store two tiles of dims, which have one scale for each head, in FP8.

    Values are transposed as codes. Transposed before, triton-xpu 3.3 computes them once
    for the codes and once more for the scales, in another layout, and registers spill.
    """
    amax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0)  # [BLOCK_H]
    exponents, inverses = block_scale(amax)  # [BLOCK_H] each
    # [64, BLOCK_H]
    low_codes = e4m3_code(low * inverses[None, :]).to(tl.uint8)
    high_codes = e4m3_code(high * inverses[None, :]).to(tl.uint8)
    dim_offs = range_behind_loop(TILE_DIM)  # [64]
    # [BLOCK_H, 64]
    value_offs = block_offs[:, None] * (2 * TILE_DIM) + dim_offs[None, :]
    row_mask = head_mask[:, None]  # [BLOCK_H, 1]
    tl.store(values_ptr + value_offs, tl.trans(low_codes), mask=row_mask)
    tl.store(values_ptr + value_offs + TILE_DIM, tl.trans(high_codes), mask=row_mask)
    tl.store(scales_ptr + block_offs, exponent_scale(exponents), mask=head_mask)


@triton.jit
def store_accumulators(
    acc0,  # [64, BLOCK_H] fp32
    acc1,  # [64, BLOCK_H] fp32
    acc2,  # [64, BLOCK_H] fp32
    acc3,  # [64, BLOCK_H] fp32
    acc4,  # [64, BLOCK_H] fp32
    acc5,  # [64, BLOCK_H] fp32
    acc6,  # [64, BLOCK_H] fp32
    acc7,  # [64, BLOCK_H] fp32
    row_max,  # [BLOCK_H] fp32
    row_sum,  # [BLOCK_H] fp32
    sink_ptr,
    head_offs,  # [BLOCK_H]
    head_mask,  # [BLOCK_H]
    token,
    out_ptr,
    scales_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_token_stride,
    out_head_stride,
    group_tokens,
    max_position,
    cos_sin_stride,
    HAS_SINK: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE_DIM: tl.constexpr = TILE_DIM,
):
    """Store the attention of a block of heads, divided by the weights' sum.

    As `store_heads` does; of the four blocks of FP8 the last one holds the rotary part.
    """
    # A lane has a head here too, as in the accumulators. [1, BLOCK_H]
    factor = softmax_factor(
        row_max[None, :],
        row_sum[None, :],
        sink_ptr,
        head_offs[None, :],
        head_mask[None, :],
        HAS_SINK,
    )
    if HEADS_PER_GROUP:
        # [BLOCK_H]
        block_offs = first_blocks(head_offs, token, group_tokens, HEADS_PER_GROUP)
        _store_fp8_block(
            out_ptr,
            scales_ptr,
            block_offs,
            _rounded(acc0, factor),
            _rounded(acc1, factor),
            head_mask,
        )
        _store_fp8_block(
            out_ptr,
            scales_ptr,
            block_offs + 1,
            _rounded(acc2, factor),
            _rounded(acc3, factor),
            head_mask,
        )
        _store_fp8_block(
            out_ptr,
            scales_ptr,
            block_offs + 2,
            _rounded(acc4, factor),
            _rounded(acc5, factor),
            head_mask,
        )
        rope = _rotate_tile_back(
            _rounded(acc7, factor),
            token,
            positions_ptr,
            cos_sin_ptr,
            max_position,
            cos_sin_stride,
            BLOCK_H,
        )
        _store_fp8_block(
            out_ptr,
            scales_ptr,
            block_offs + 3,
            _rounded(acc6, factor),
            rope,
            head_mask,
        )
    else:
        row_mask = head_mask[:, None]  # [BLOCK_H, 1]
        token_out_ptr = out_ptr + token * out_token_stride
        # [BLOCK_H, 1]
        out_row_ptrs = token_out_ptr + head_offs.to(tl.int64)[:, None] * out_head_stride
        out_ptrs = out_row_ptrs + range_behind_loop(TILE_DIM)[None, :]  # [BLOCK_H, 64]
        _store_tile(out_ptrs + 0 * TILE_DIM, acc0, factor, row_mask)
        _store_tile(out_ptrs + 1 * TILE_DIM, acc1, factor, row_mask)
        _store_tile(out_ptrs + 2 * TILE_DIM, acc2, factor, row_mask)
        _store_tile(out_ptrs + 3 * TILE_DIM, acc3, factor, row_mask)
        _store_tile(out_ptrs + 4 * TILE_DIM, acc4, factor, row_mask)
        _store_tile(out_ptrs + 5 * TILE_DIM, acc5, factor, row_mask)
        _store_tile(out_ptrs + 6 * TILE_DIM, acc6, factor, row_mask)
        _store_tile(out_ptrs + 7 * TILE_DIM, acc7, factor, row_mask)
