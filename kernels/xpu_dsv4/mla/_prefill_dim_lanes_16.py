# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse prefill for 9 to 16 heads on Intel GPUs: `_prefill_dim_lanes` in one block.

The lanes of a matrix instruction hold 16 heads. One block of 16 reads each key once and
leaves no lane empty, where two blocks of 8 read each key twice and repeat their heads.

The accumulator takes 64 of 256 registers, which leaves little room:

- A sub-group adds up the scores of two keys, and a lane those of one head, which is
  also the head whose parts it has. So a lane loads the weights of a key as one vector
  of all heads. The compiler keeps the addresses of shared local memory in registers.
- An attempt sets the accumulator to 0 and stores the result. Were it stored behind the
  loop over attempts, the compiler would hold a second accumulator for that loop.
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
    row_max,  # [LANES] fp32
    taken,
    TILE_N: tl.constexpr = TILE_N,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    LANES: tl.constexpr = LANES,
    WARPS: tl.constexpr = WARPS,
):
    """The scores of a tile of keys less `row_max`, `[TILE_N, LANES]` fp32.

    The branch and the scan are those of `_prefill_dim_lanes`.
    """
    parts = tl.zeros([WARPS, TILE_N, LANES], tl.float32)  # [WARPS, TILE_N, LANES]
    if taken:
        rows = tl.permute(k, (1, 2, 3, 4, 0))  # [WARPS, TILE_N, 2, 2, LANES]
        parts = tl.dot(tl.reshape(rows, (WARPS, TILE_N, HEAD_DIM // WARPS)), q)
    parts = tl.reshape(parts, (2, 2, 2, TILE_N, LANES))
    a, b = tl.split(tl.permute(parts, (3, 4, 0, 1, 2)))
    a, b = tl.split(a + b)
    a, b = tl.split(a + b)
    scores = tl.cumsum((a + b)[:, :, None], 2)
    scores = tl.reshape(scores, (TILE_N, LANES))
    logits = scores * qk_scale - row_max[None, :]
    return tl.where(counts[:, None], logits, float("-inf"))


@triton.jit
def _load_queries(
    q_ptrs,  # [LANES, WARPS, LANES, 4]
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    WARPS: tl.constexpr = WARPS,
    LANES: tl.constexpr = LANES,
):
    """The right operand of the scores' product, `[WARPS, 64, LANES]` bf16."""
    q = tl.load(q_ptrs).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.permute(q, (1, 3, 2, 0)), (WARPS, HEAD_DIM // WARPS, LANES))


@triton.jit
def _store(
    acc,  # [LANES, 512] fp32
    factor,  # [LANES] fp32
    head_offs,  # [LANES]
    head_mask,  # [LANES]
    token,
    zero,
    out_ptr,
    out_token_stride,
    out_head_stride,
    scales_ptr,
    positions_ptr,
    cos_sin_ptr,
    group_tokens,
    max_position,
    cos_sin_stride,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    LANES: tl.constexpr = LANES,
    WARPS: tl.constexpr = WARPS,
    LANE_WORDS: tl.constexpr = LANE_WORDS,
):
    """Store the accumulated values times `factor`."""
    # As in `_prefill_dim_lanes`, for which see why.
    tl.debug_barrier()
    acc = acc * factor[:, None]
    tl.debug_barrier()
    acc = tl.reshape(acc, (LANES, LANE_WORDS, WARPS, 2, LANES))
    acc = tl.permute(acc, (0, 2, 4, 1, 3))  # [LANES, WARPS, LANES, 2, 2]
    if HEADS_PER_GROUP:
        store_fp8(
            tl.reshape(acc, (LANES, HEAD_DIM // 4, LANE_WORDS, 2)),
            head_offs,
            head_mask,
            token,
            zero,
            out_ptr,
            scales_ptr,
            positions_ptr,
            cos_sin_ptr,
            group_tokens,
            max_position,
            cos_sin_stride,
            HEADS_PER_GROUP,
            LANES,
        )
    else:
        # [LANES]
        out_row_ptrs = out_ptr + token * out_token_stride
        out_row_ptrs += head_offs.to(tl.int64) * out_head_stride
        dim_offs = range_behind_loop(HEAD_DIM)  # [512]
        x = tl.reshape(acc, (LANES, HEAD_DIM)).to(tl.bfloat16)
        out_ptrs = out_row_ptrs[:, None] + dim_offs[None, :]
        tl.store(out_ptrs, x, mask=head_mask[:, None])


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
def _dim_lanes_16_prefill_kernel(
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
    """All heads of one token, at most 16, as `_prefill_kernel`.

    `kv_stride` is HEAD_DIM, BLOCK_H the number of lanes, and BLOCK_N, the keys of an
    iteration, one tile.
    """
    tl.static_assert(TILE_N == BLOCK_N and BLOCK_H == LANES)
    LANE_DIMS: tl.constexpr = 2 * LANE_WORDS
    kv_ptr = kv_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    q_ptr = q_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    token = tl.program_id(0).to(tl.int64)
    # A head that does not exist is the first head.
    lane_heads = tl.arange(0, LANES)  # [LANES]
    lane_heads = tl.where(lane_heads < num_heads, lane_heads, 0)
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
    q_ptrs = q_head_ptrs[:, None, None, None] + q_dims  # [LANES, WARPS, LANES, 4]
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
    row_max = tl.zeros([LANES], tl.float32)  # [LANES]
    # [TILE_N, LANES]
    peaks = tl.full([TILE_N, LANES], float("-inf"), tl.float32)
    last_key = num_keys
    next_rows = tl.full([TILE_N], -1, tl.int32)  # [TILE_N]
    if num_keys > 0:
        next_rows = load_rows(index_ptrs, 0, num_keys, num_rows)
    q = _load_queries(q_ptrs)  # [WARPS, 64, LANES]
    for attempt in range(0, 2):
        if HEADS_PER_GROUP:
            # The compiler has no registers to keep it while it stores FP8.
            q = _load_queries(q_ptrs)
        column_sums = tl.zeros([TILE_N, LANES], tl.float32)  # [TILE_N, LANES]
        acc = tl.zeros([LANES, HEAD_DIM], tl.float32)  # [LANES, 512]
        for start in range(0, last_key, TILE_N):
            rows = next_rows  # [TILE_N]
            # An iteration ahead, so that the loads of keys do not wait for them; behind
            # the last those of the first.
            next_start = start + TILE_N
            next_start = tl.where(next_start < last_key, next_start, 0)
            next_rows = load_rows(index_ptrs, next_start, num_keys, num_rows)
            k, _ = load_keys(rows, lane_ptrs, some_row)
            # Loaded again, by the lanes that need it.
            counts = load_rows(index_ptrs, start, num_keys, num_rows) >= 0  # [TILE_N]
            # [TILE_N, LANES]
            logits = _logits(k, counts, q, qk_scale, row_max, start < last_key)
            peaks = tl.maximum(peaks, logits)
            weights = tl.exp2(logits)
            column_sums += weights
            weights = tl.trans(weights.to(tl.bfloat16))  # [LANES, TILE_N]
            acc = add_values(acc, weights, k, start < last_key)
        peak = tl.max(peaks, 0)  # [LANES]
        far_mask = (tl.abs(peak) > FARTHEST) & (peak > EMPTY_MAX)  # [LANES]
        num_far = tl.max(far_mask.to(tl.int32), 0)
        is_far = (num_far > 0) & (attempt == 0)
        is_done = ((attempt == 0) | (last_key > 0)) & (is_far == 0)
        last_key = tl.where(is_far, num_keys, 0)
        # Other heads keep their bits.
        row_max = tl.where(is_far & far_mask, peak, row_max)
        if is_done:
            # The compiler does not know that it is 0. It would compute before the loops
            # what follows from the token alone, and keep that in registers.
            zero = tl.minimum(num_far, 0)
            head_offs = range_behind_loop(LANES)  # [LANES]
            head_mask = head_offs < num_heads  # [LANES]
            row_sum = tl.sum(column_sums, 0)  # [LANES]
            factor = sink_factor(
                row_max, row_sum, sink_ptr, head_offs, head_mask, HAS_SINK
            )
            _store(
                acc,
                factor,
                head_offs,
                head_mask,
                token + zero,
                zero,
                out_ptr,
                out_token_stride,
                out_head_stride,
                scales_ptr,
                positions_ptr,
                cos_sin_ptr,
                group_tokens,
                max_position,
                cos_sin_stride,
                HEADS_PER_GROUP,
            )
