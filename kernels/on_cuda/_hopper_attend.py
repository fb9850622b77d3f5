# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of 64 heads over tiles of keys in shared memory on Hopper, in Gluon.

Eight warps multiply; others fill two tiles of keys, one after another. Of the sums four
warps have the first 256 dims, and four the others. They share the scores through shared
memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..xpu_dsv4._softmax import softmax_factor
from ._softmax_step import softmax_weights

FILL_THREADS = 128
"""Threads that fill tiles."""
FILL_REGISTERS = 72
"""Registers of each; the eight warps have the others."""
KEY_TILES = 2

# Triton 3.7 calls it `barrier`.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def key_tiles(
    KEY_TILES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ARRIVALS: gl.constexpr,
):
    """Tiles of keys in shared memory, `[KEY_TILES, BLOCK_N, HEAD_DIM]`, which of these
    keys there are, and barriers for each tile: filled, by so many arrivals, and free.
    """
    keys = gl.allocate_shared_memory(
        gl.bfloat16, [KEY_TILES, BLOCK_N, HEAD_DIM], gl.NVMMASharedLayout(128, 16)
    )
    valid = gl.allocate_shared_memory(
        gl.int32, [KEY_TILES, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    filled = gl.allocate_shared_memory(
        gl.int64, [KEY_TILES, 1], mbarrier.MBarrierLayout()
    )
    free = gl.allocate_shared_memory(
        gl.int64, [KEY_TILES, 1], mbarrier.MBarrierLayout()
    )
    for stage in gl.static_range(KEY_TILES):
        mbarrier.init(filled.index(stage), count=ARRIVALS)
        mbarrier.init(free.index(stage), count=1)
    return keys, valid, filled, free


@gluon.jit
def _multiply_scores(q, keys, filled, tile, zeros):
    """Start the product of q and a tile of keys, when it is filled."""
    KEY_TILES: gl.constexpr = keys.shape[0]
    mbarrier.wait(filled.index(tile % KEY_TILES), tile // KEY_TILES % 2)
    fence_async_shared()
    return warpgroup_mma(
        q,
        keys.index(tile % KEY_TILES).permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def _key_mask(valid, tile, key_rows: gl.constexpr):
    """Which keys of a tile there are, `[BLOCK_N]`."""
    return valid.index(tile % valid.shape[0]).load(key_rows) != 0


@gluon.jit
def _multiply_values(
    scores, key_mask, qk_scale, row_max, column_sums, acc, p, keys, tile
):
    """Take one tile of scores into the softmax, and start the product of its weights
    and the values."""
    KEY_TILES: gl.constexpr = keys.shape[0]
    weights, rescale, row_max = softmax_weights(scores, key_mask, qk_scale, row_max)
    column_sums = column_sums * rescale[:, None] + weights
    p.store(weights.to(gl.bfloat16))
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = acc * gl.convert_layout(rescale, acc_rows)[:, None]
    fence_async_shared()
    sums = warpgroup_mma(p, keys.index(tile % KEY_TILES), acc, is_async=True)
    return sums, row_max, column_sums


@gluon.jit
def hand_over(barriers, tile):
    """Arrive at a tile's barrier, when all warps are done with it."""
    _barrier()
    mbarrier.arrive(barriers.index(tile % barriers.shape[0]), count=1)


@gluon.jit
def attend(
    keys,
    valid,  # [KEY_TILES, BLOCK_N] in shared memory
    filled,
    free,
    num_keys,
    q_ptr,
    q_head_stride,
    first_head,
    num_heads,
    qk_scale,
    sink_ptr,
    out_ptr,
    out_head_stride,
    part_ptr,
    state_ptr,
    num_splits,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_H: gl.constexpr,
    EMPTY_MAX: gl.constexpr,
):
    """Attention of one block of heads of one token. Without keys it takes one tile of
    none."""
    BLOCK_N: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 2], [16, BLOCK_N // 2, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, HEAD_DIM], operand)
    p = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], operand)

    head_offs = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, rows_layout))
    dim_offs = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, rows_layout))
    row_mask = (head_offs < num_heads)[:, None]
    q_row_ptrs = q_ptr + head_offs.to(gl.int64)[:, None] * q_head_stride
    q.store(gl.load(q_row_ptrs + dim_offs[None, :], mask=row_mask, other=0.0))
    fence_async_shared()

    of_keys: gl.constexpr = gl.SliceLayout(0, scores_layout)
    row_max = gl.full(
        [BLOCK_H], EMPTY_MAX, gl.float32, gl.SliceLayout(1, scores_layout)
    )
    column_sums = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, scores_layout)
    zeros = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, scores_layout)
    acc = gl.zeros([BLOCK_H, HEAD_DIM], gl.float32, acc_layout)
    num_tiles = gl.maximum(gl.cdiv(num_keys, BLOCK_N), 1)
    last_tile = num_tiles - 1

    product = _multiply_scores(q, keys, filled, 0, zeros)
    key_mask = _key_mask(valid, 0, of_keys)
    scores = warpgroup_mma_wait(0, deps=(product,))
    for tile in range(last_tile):
        sums, row_max, column_sums = _multiply_values(
            scores, key_mask, qk_scale, row_max, column_sums, acc, p, keys, tile
        )
        # The tensor cores have this to do when the sums are ready.
        product = _multiply_scores(q, keys, filled, tile + 1, zeros)
        key_mask = _key_mask(valid, tile + 1, of_keys)
        acc = warpgroup_mma_wait(1, deps=(sums,))
        hand_over(free, tile)
        scores = warpgroup_mma_wait(0, deps=(product,))
    sums, row_max, column_sums = _multiply_values(
        scores, key_mask, qk_scale, row_max, column_sums, acc, p, keys, last_tile
    )
    acc = warpgroup_mma_wait(0, deps=(sums,))

    # Behind the product: the sums over warps lie where `p` was.
    row_sum = gl.sum(column_sums, 1)  # [BLOCK_H]
    row_heads = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, scores_layout))
    head_mask = row_heads < num_heads  # [BLOCK_H]
    if SPLIT:
        gl.store(state_ptr + row_heads * num_splits * 2, row_max, mask=head_mask)
        gl.store(state_ptr + row_heads * num_splits * 2 + 1, row_sum, mask=head_mask)
        acc_heads = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, acc_layout))
        acc_dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, acc_layout))
        acc_mask = (acc_heads < num_heads)[:, None] & (num_keys > 0)
        acc_row_ptrs = part_ptr + acc_heads[:, None] * num_splits * HEAD_DIM
        gl.store(acc_row_ptrs + acc_dims[None, :], acc, mask=acc_mask)
    else:
        factor = softmax_factor(
            row_max, row_sum, sink_ptr, row_heads, head_mask, HAS_SINK
        )
        factor = gl.convert_layout(factor, gl.SliceLayout(1, acc_layout))
        # Rows of the output take the place of q.
        q.store((acc * factor[:, None]).to(gl.bfloat16))
        out_row_ptrs = out_ptr + head_offs.to(gl.int64)[:, None] * out_head_stride
        gl.store(out_row_ptrs + dim_offs[None, :], q.load(rows_layout), mask=row_mask)
