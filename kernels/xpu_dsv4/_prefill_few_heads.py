# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse prefill for a few heads on Intel GPUs: a lane of a sub-group loads a key.

With dims of a key in the registers of one lane, a tile of keys is the right operand of
the scores' product as it is loaded, and the left one of the values' product. Neither
goes through shared local memory; weights alone do. Sub-groups share the keys for the
scores, and the dims for the values, so each loads its part of a tile twice.

Layouts come from the order of a load's axes. triton-xpu 3.3 gives a lane 16 bytes along
the contiguous axis, then lanes and sub-groups to the axes in front, in their order.
"""

from ._dims_first import range_behind_loop, store_accumulators, zero_accumulator
from ._pages import HEAD_DIM
from ._softmax import EMPTY_MAX, exceeds_maximum
from ._triton import tl, triton

LANES = 16
"""Lanes of a sub-group, and columns of a matrix instruction."""
LANE_DIMS = 8
"""Dims that a lane loads at a time: 16 bytes."""
TILE_DIM = 64
"""Dims of one tile."""
SCAN = 256
"""Indices that are looked through at a time for a row that exists."""


@triton.jit
def _heads_twice(
    x,  # [LANES // 2]
    LANES: tl.constexpr = LANES,
):
    """`x` and `x` again, `[LANES]`: half the lanes of a product have no head."""
    return tl.reshape(tl.trans(tl.join(x, x)), (LANES,))


@triton.jit
def _load_rows(
    index_ptrs,
    offs,
    num_keys,
    num_rows,
    some_row,
):
    """Rows of keys, in the shape of `offs`, and which of them count.

    `some_row`, which counts, stands for those that do not: then no load needs a mask,
    which is a branch for each, and no value that is not the token's own is read.
    """
    rows = tl.load(index_ptrs + offs, mask=offs < num_keys, other=-1)
    counts = (rows >= 0) & (rows < num_rows)
    return tl.where(counts, rows, some_row).to(tl.int64), counts


@triton.jit
def _find_row(
    index_ptrs,
    num_keys,
    num_rows,
    SCAN: tl.constexpr = SCAN,
):
    """A row of a key that counts, or -1 if none does."""
    scan_offs = tl.arange(0, SCAN)  # [SCAN]
    found = tl.full([SCAN], -1, tl.int32)  # [SCAN]
    for start in range(0, num_keys, SCAN):
        offs = start + scan_offs  # [SCAN]
        rows = tl.load(index_ptrs + offs, mask=offs < num_keys, other=-1)  # [SCAN]
        counts = (rows >= 0) & (rows < num_rows)
        found = tl.maximum(found, tl.where(counts, rows, -1).to(tl.int32))
    return tl.max(found, 0)


@triton.jit
def _add_scores(
    scores,  # [BLOCK_H, BLOCK_N] fp32
    q_ptrs,  # [BLOCK_H, 64]
    key_ptrs,  # [BLOCK_N]
    start,
    num_keys,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_DIM: tl.constexpr = TILE_DIM,
    LANE_DIMS: tl.constexpr = LANE_DIMS,
):
    """`scores` plus the products of the dims of one tile.

    The product stands behind a branch that is always taken, in turns as in
    `_dims_first`. Where triton-xpu 3.3 sees that a product follows from another, each
    sub-group computes all scores.
    """
    keys_left = start < num_keys if TILE % 2 == 0 else num_keys > start
    if keys_left:
        tile_ptr = tl.advance(q_ptrs, (0, TILE * TILE_DIM))  # [BLOCK_H, 64]
        q = tl.load(tile_ptr, boundary_check=(0,), padding_option="zero")
        blocks = tl.arange(0, TILE_DIM // LANE_DIMS)[None, :, None] * LANE_DIMS
        dims = blocks + tl.arange(0, LANE_DIMS)[None, None, :] + TILE * TILE_DIM
        # [BLOCK_N, 8, 8]
        k = tl.load(key_ptrs[:, None, None] + dims).to(tl.bfloat16, bitcast=True)
        k = tl.reshape(tl.permute(k, (1, 2, 0)), (TILE_DIM, BLOCK_N))  # [64, BLOCK_N]
        scores = tl.dot(q, k, scores)
    return scores


@triton.jit
def _add_values(
    acc,  # [64, LANES] fp32
    p,  # [BLOCK_N, LANES] bf16
    value_ptrs,  # [LANES, BLOCK_N // LANES]
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    TILE_DIM: tl.constexpr = TILE_DIM,
    LANE_DIMS: tl.constexpr = LANE_DIMS,
):
    """`acc` plus the transpose of the values that `p` weighs."""
    PARTS: tl.constexpr = TILE_DIM // LANE_DIMS // WARPS
    warp_dims = tl.arange(0, WARPS)[None, :, None, None, None] * (PARTS * LANE_DIMS)
    part_dims = tl.arange(0, PARTS)[None, None, :, None, None] * LANE_DIMS
    lane_dims = tl.arange(0, LANE_DIMS)[None, None, None, None, :]
    dims = warp_dims + part_dims + lane_dims + TILE * TILE_DIM
    # [LANES, WARPS, PARTS, BLOCK_N // LANES, 8]
    v = tl.load(value_ptrs[:, None, None, :, None] + dims)
    v = v.to(tl.bfloat16, bitcast=True)
    v = tl.reshape(tl.permute(v, (1, 2, 4, 3, 0)), (TILE_DIM, BLOCK_N))  # [64, BLOCK_N]
    return tl.dot(v, p, acc)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "width",
        "indices_stride",
        "group_tokens",
        "max_position",
    ],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def _few_heads_prefill_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    lens_ptr,
    sink_ptr,
    out_ptr,
    num_heads,
    num_rows,
    width,
    q_token_stride,
    q_head_stride,
    kv_stride,
    indices_stride,
    out_token_stride,
    out_head_stride,
    qk_scale,
    scales_ptr,
    positions_ptr,
    cos_sin_ptr,
    group_tokens,
    max_position,
    cos_sin_stride,
    HAS_LENS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    TILE_DIM: tl.constexpr = TILE_DIM,
    LANES: tl.constexpr = LANES,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
):
    """One block of 8 heads of one token, as `_prefill_kernel`.

    `kv_stride` is HEAD_DIM, and a product of values has a column for each of 16 lanes,
    of which the second half repeats the heads of the first with weights of 0.
    """
    # As integers: triton-xpu 3.3 would put loaded bf16 together anew for each product,
    # and registers spill.
    kv_ptr = kv_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // num_head_blocks).to(tl.int64)
    first_head = (tl.program_id(0) % num_head_blocks) * BLOCK_H
    # [BLOCK_H, 64]
    q_ptrs = tl.make_block_ptr(
        q_ptr + token * q_token_stride,
        shape=(num_heads, HEAD_DIM),
        strides=(q_head_stride, 1),
        offsets=(first_head, 0),
        block_shape=(BLOCK_H, TILE_DIM),
        order=(1, 0),
    )
    if HAS_LENS:
        given_keys = tl.load(lens_ptr + token)
        num_keys = tl.minimum(tl.maximum(given_keys, 0), width).to(tl.int32)
    else:
        num_keys = width
    index_ptrs = indices_ptr + token * indices_stride
    some_row = _find_row(index_ptrs, num_keys, num_rows)
    if some_row < 0:
        num_keys = 0

    tile_offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    # [LANES, BLOCK_N // LANES]
    value_offs = (
        tl.arange(0, LANES)[:, None] + tl.arange(0, BLOCK_N // LANES)[None, :] * LANES
    )
    row_max = tl.full([BLOCK_H], EMPTY_MAX, tl.float32)  # [BLOCK_H]
    row_sum = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
    # [64, LANES] each
    acc0 = zero_accumulator(LANES)
    acc1 = zero_accumulator(LANES)
    acc2 = zero_accumulator(LANES)
    acc3 = zero_accumulator(LANES)
    acc4 = zero_accumulator(LANES)
    acc5 = zero_accumulator(LANES)
    acc6 = zero_accumulator(LANES)
    acc7 = zero_accumulator(LANES)
    for start in range(0, num_keys, BLOCK_N):
        # [BLOCK_N] each
        rows, key_mask = _load_rows(
            index_ptrs, start + tile_offs, num_keys, num_rows, some_row
        )
        key_ptrs = kv_ptr + rows * HEAD_DIM  # [BLOCK_N]
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # [BLOCK_H, BLOCK_N]
        scores = _add_scores(scores, q_ptrs, key_ptrs, start, num_keys, 0, BLOCK_N)
        scores = _add_scores(scores, q_ptrs, key_ptrs, start, num_keys, 1, BLOCK_N)
        scores = _add_scores(scores, q_ptrs, key_ptrs, start, num_keys, 2, BLOCK_N)
        scores = _add_scores(scores, q_ptrs, key_ptrs, start, num_keys, 3, BLOCK_N)
        scores = _add_scores(scores, q_ptrs, key_ptrs, start, num_keys, 4, BLOCK_N)
        scores = _add_scores(scores, q_ptrs, key_ptrs, start, num_keys, 5, BLOCK_N)
        scores = _add_scores(scores, q_ptrs, key_ptrs, start, num_keys, 6, BLOCK_N)
        scores = _add_scores(scores, q_ptrs, key_ptrs, start, num_keys, 7, BLOCK_N)
        # [BLOCK_H, BLOCK_N]
        logits = tl.where(key_mask[None, :], scores * qk_scale, float("-inf"))
        if exceeds_maximum(logits, row_max):
            new_max = tl.maximum(row_max, tl.max(logits, 1))  # [BLOCK_H]
            rescale = tl.exp2(row_max - new_max)  # [BLOCK_H]
            row_max = new_max
            row_sum *= rescale
            lane_rescale = _heads_twice(rescale)[None, :]  # [1, LANES]
            acc0 *= lane_rescale
            acc1 *= lane_rescale
            acc2 *= lane_rescale
            acc3 *= lane_rescale
            acc4 *= lane_rescale
            acc5 *= lane_rescale
            acc6 *= lane_rescale
            acc7 *= lane_rescale
        weights = tl.exp2(logits - row_max[:, None])  # [BLOCK_H, BLOCK_N]
        row_sum += tl.sum(weights, 1)
        p = weights.to(tl.bfloat16)  # [BLOCK_H, BLOCK_N]
        p = tl.permute(tl.join(p, tl.zeros_like(p)), (2, 0, 1))  # [2, BLOCK_H, BLOCK_N]
        p = tl.trans(tl.reshape(p, (LANES, BLOCK_N)))  # [BLOCK_N, LANES]
        value_rows, _ = _load_rows(
            index_ptrs, start + value_offs, num_keys, num_rows, some_row
        )
        value_ptrs = kv_ptr + value_rows * HEAD_DIM  # [LANES, BLOCK_N // LANES]
        # Always taken; it hides that these products follow from those of the scores.
        if start < num_keys:
            acc0 = _add_values(acc0, p, value_ptrs, 0, BLOCK_N, WARPS)
            acc1 = _add_values(acc1, p, value_ptrs, 1, BLOCK_N, WARPS)
            acc2 = _add_values(acc2, p, value_ptrs, 2, BLOCK_N, WARPS)
            acc3 = _add_values(acc3, p, value_ptrs, 3, BLOCK_N, WARPS)
            acc4 = _add_values(acc4, p, value_ptrs, 4, BLOCK_N, WARPS)
            acc5 = _add_values(acc5, p, value_ptrs, 5, BLOCK_N, WARPS)
            acc6 = _add_values(acc6, p, value_ptrs, 6, BLOCK_N, WARPS)
            acc7 = _add_values(acc7, p, value_ptrs, 7, BLOCK_N, WARPS)

    lane_offs = range_behind_loop(LANES)  # [LANES]
    head_offs = first_head + lane_offs  # [LANES]
    head_mask = (head_offs < num_heads) & (lane_offs < BLOCK_H)  # [LANES]
    store_accumulators(
        acc0,
        acc1,
        acc2,
        acc3,
        acc4,
        acc5,
        acc6,
        acc7,
        _heads_twice(row_max),
        _heads_twice(row_sum),
        sink_ptr,
        head_offs,
        head_mask,
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
        HAS_SINK,
        HEADS_PER_GROUP,
        LANES,
    )
