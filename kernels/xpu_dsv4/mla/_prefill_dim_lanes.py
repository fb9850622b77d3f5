# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse prefill for a few heads on Intel GPUs: the lanes share the dims of a key.

A sub-group owns 64 dims of all keys and of the result, and loads each key once: its
lanes read bytes in a row, so no cache line is looked up twice. What is loaded is the
left operand of the scores' product and the right one of the values'. Queries stay in
registers. Through shared local memory go the parts of the scores, which the sub-groups
add up, and the weights.

Weights are 2^score without a maximum, which fits into fp32 and bf16 unless the largest
score of a head is far from 0. Where one is, the block reads all keys again, with the
maxima that are then known.
A branch in the loop would make the compiler copy the accumulator in each iteration.
"""

from .._pages import HEAD_DIM
from .._softmax import EMPTY_MAX
from .._triton import tl, triton
from ._dim_lanes import (
    FARTHEST,
    LANE_WORDS,
    LANES,
    TILE_N,
    WARPS,
    add_values,
    find_row,
    load_keys,
    load_rows,
    sink_factor,
    store_fp8,
)
from ._dims_first import range_behind_loop


@triton.jit
def _logits(
    k,  # [LANES, WARPS, TILE_N, 2, 2] bf16
    counts,  # [TILE_N]
    q,  # [WARPS, 64, LANES] bf16
    qk_scale,
    row_max,  # [BLOCK_H] fp32
    taken,
    BLOCK_H: tl.constexpr,
    TILE_N: tl.constexpr = TILE_N,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    LANES: tl.constexpr = LANES,
    WARPS: tl.constexpr = WARPS,
):
    """The scores of a tile of keys less `row_max`, `[BLOCK_H, TILE_N]` fp32.

    The product stands behind a branch on `taken`, which is always true, as in
    `_dims_first`. The
    scan keeps the layouts of what follows (Triton's assignment of values to lanes) from
    going back to the product, which triton-xpu 3.3 would then compute once for each.
    """
    parts = tl.zeros([WARPS, TILE_N, LANES], tl.float32)  # [WARPS, TILE_N, LANES]
    if taken:
        rows = tl.permute(k, (1, 2, 3, 4, 0))  # [WARPS, TILE_N, 2, 2, LANES]
        parts = tl.dot(tl.reshape(rows, (WARPS, TILE_N, HEAD_DIM // WARPS)), q)
    parts = tl.reshape(parts, (2, 2, 2, TILE_N, LANES))
    a, b = tl.split(tl.permute(parts, (4, 3, 0, 1, 2)))
    a, b = tl.split(a + b)
    a, b = tl.split(a + b)
    # The second half of the lanes repeats the heads of the first.
    halves = tl.permute(tl.reshape(a + b, (2, BLOCK_H, TILE_N)), (1, 2, 0))
    scores, _ = tl.split(halves)  # [BLOCK_H, TILE_N]
    scores = tl.cumsum(scores[:, :, None], 2)
    scores = tl.reshape(scores, (BLOCK_H, TILE_N))
    logits = scores * qk_scale - row_max[:, None]
    return tl.where(counts[None, :], logits, float("-inf"))


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
def _dim_lanes_prefill_kernel(
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
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    LANES: tl.constexpr = LANES,
    WARPS: tl.constexpr = WARPS,
    LANE_WORDS: tl.constexpr = LANE_WORDS,
    TILE_N: tl.constexpr = TILE_N,
    FARTHEST: tl.constexpr = FARTHEST,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
):
    """One block of 8 heads of one token, as `_prefill_kernel`.

    `kv_stride` is HEAD_DIM, and BLOCK_N, the keys of an iteration, two tiles, each of
    which hides the other's waits.
    """
    tl.static_assert(2 * TILE_N == BLOCK_N and 2 * BLOCK_H == LANES)
    LANE_DIMS: tl.constexpr = 2 * LANE_WORDS
    kv_ptr = kv_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    q_ptr = q_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // num_head_blocks).to(tl.int64)
    first_head = (tl.program_id(0) % num_head_blocks) * BLOCK_H
    # The second half of the lanes repeats the first, and a head that does not exist the
    # first head.
    lane_heads = first_head + tl.arange(0, LANES) % BLOCK_H  # [LANES]
    lane_heads = tl.where(lane_heads < num_heads, lane_heads, first_head)
    warp_offs = tl.arange(0, WARPS)[None, :, None, None]
    # [1, WARPS, LANES, 4]
    q_dims = (
        warp_offs * (HEAD_DIM // WARPS)
        + tl.arange(0, LANES)[None, None, :, None] * LANE_DIMS
        + tl.arange(0, LANE_DIMS)[None, None, None, :]
    )
    q_head_ptrs = (
        q_ptr + token * q_token_stride + lane_heads.to(tl.int64) * q_head_stride
    )
    # [LANES, WARPS, LANES, 4]
    q = tl.load(q_head_ptrs[:, None, None, None] + q_dims).to(tl.bfloat16, bitcast=True)
    q = tl.reshape(tl.permute(q, (1, 3, 2, 0)), (WARPS, HEAD_DIM // WARPS, LANES))
    if HAS_LENS:
        given_keys = tl.load(lens_ptr + token)
        num_keys = tl.minimum(tl.maximum(given_keys, 0), width).to(tl.int32)
    else:
        num_keys = width
    index_ptrs = indices_ptr + token * indices_stride
    some_row = find_row(index_ptrs, num_keys, num_rows)
    if some_row < 0:
        num_keys = 0

    # [LANES, WARPS, 1, 2]
    lane_ptrs = kv_ptr + (
        warp_offs * (LANES * LANE_WORDS)
        + tl.arange(0, LANES)[:, None, None, None] * LANE_WORDS
        + tl.arange(0, LANE_WORDS)[None, None, None, :]
    )
    row_max = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
    column_sums = tl.zeros([BLOCK_H, TILE_N], tl.float32)  # [BLOCK_H, TILE_N]
    # [BLOCK_H, TILE_N]
    peaks = tl.full([BLOCK_H, TILE_N], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)  # [BLOCK_H, 512]
    last_key = num_keys
    next_rows0 = tl.full([TILE_N], -1, tl.int32)  # [TILE_N]
    next_rows1 = next_rows0
    if num_keys > 0:
        next_rows0 = load_rows(index_ptrs, 0, num_keys, num_rows)
        next_rows1 = load_rows(index_ptrs, TILE_N, num_keys, num_rows)
    for attempt in range(0, 2):
        for start in range(0, last_key, 2 * TILE_N):
            rows0, rows1 = next_rows0, next_rows1  # [TILE_N] each
            # An iteration ahead, so that the loads of keys do not wait for them; behind
            # the last those of the first.
            next_start = start + 2 * TILE_N
            next_start = tl.where(next_start < last_key, next_start, 0)
            next_rows0 = load_rows(index_ptrs, next_start, num_keys, num_rows)
            next_rows1 = load_rows(index_ptrs, next_start + TILE_N, num_keys, num_rows)
            k0, counts0 = load_keys(rows0, lane_ptrs, some_row)
            k1, counts1 = load_keys(rows1, lane_ptrs, some_row)
            # [BLOCK_H, TILE_N] each
            logits0 = _logits(
                k0, counts0, q, qk_scale, row_max, start < last_key, BLOCK_H
            )
            logits1 = _logits(
                k1, counts1, q, qk_scale, row_max, last_key > start, BLOCK_H
            )
            peaks = tl.maximum(peaks, tl.maximum(logits0, logits1))
            weights0 = tl.exp2(logits0)
            weights1 = tl.exp2(logits1)
            column_sums += weights0 + weights1
            acc = add_values(acc, weights0, k0, start < last_key)
            acc = add_values(acc, weights1, k1, last_key > start)
        peak = tl.max(peaks, 1)  # [BLOCK_H]
        far_mask = (tl.abs(peak) > FARTHEST) & (peak > EMPTY_MAX)  # [BLOCK_H]
        is_far = tl.max(far_mask.to(tl.int32), 0) > 0
        last_key = tl.where(is_far, num_keys, 0)
        if is_far & (attempt == 0):
            # Other heads keep their bits.
            row_max = tl.where(far_mask, peak, 0.0)
            column_sums = tl.zeros([BLOCK_H, TILE_N], tl.float32)
            acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)

    head_offs = first_head + range_behind_loop(BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    factor = sink_factor(
        row_max, tl.sum(column_sums, 1), sink_ptr, head_offs, head_mask, HAS_SINK
    )
    # triton-xpu 3.3 hands factors from lane to lane through shared local memory, and
    # sets no barrier before or behind that. Without these a sub-group takes another's
    # factors for its own sums.
    tl.debug_barrier()
    acc = acc * factor[:, None]
    tl.debug_barrier()
    acc = tl.reshape(acc, (BLOCK_H, LANE_WORDS, WARPS, 2, LANES))
    acc = tl.permute(acc, (0, 2, 4, 1, 3))  # [BLOCK_H, WARPS, LANES, 2, 2]
    if HEADS_PER_GROUP:
        store_fp8(
            tl.reshape(acc, (BLOCK_H, HEAD_DIM // LANE_DIMS, LANE_WORDS, 2)),
            head_offs,
            head_mask,
            token,
            0,
            out_ptr,
            scales_ptr,
            positions_ptr,
            cos_sin_ptr,
            group_tokens,
            max_position,
            cos_sin_stride,
            HEADS_PER_GROUP,
            BLOCK_H,
        )
    else:
        # [BLOCK_H]
        out_row_ptrs = out_ptr + token * out_token_stride
        out_row_ptrs += head_offs.to(tl.int64) * out_head_stride
        out_ptrs = out_row_ptrs[:, None] + range_behind_loop(HEAD_DIM)[None, :]
        x = tl.reshape(acc, (BLOCK_H, HEAD_DIM)).to(tl.bfloat16)
        tl.store(out_ptrs, x, mask=head_mask[:, None])
