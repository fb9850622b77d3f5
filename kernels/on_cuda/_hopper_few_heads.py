# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse prefill of up to 16 heads on Hopper, in Gluon, to bf16.

The matrix instructions take 64 rows of their left operand at least, and few heads would
leave most of them empty. So keys are rows of the scores, and dims rows of the sums.
Three tiles of keys are in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..xpu_dsv4._pages import HEAD_DIM
from ..xpu_dsv4._softmax import EMPTY_MAX, softmax_factor
from ._hopper_attend import FILL_THREADS, hand_over, key_tiles
from ._hopper_prefill import fill, num_keys_of

FILL_REGISTERS = 88
KEY_TILES = 3


@gluon.jit
def _multiply_scores(q, keys, filled, tile, zeros):
    """Start the product of a tile of keys, when it is filled, and q."""
    KEY_TILES: gl.constexpr = keys.shape[0]
    mbarrier.wait(filled.index(tile % KEY_TILES), tile // KEY_TILES % 2)
    fence_async_shared()
    return warpgroup_mma(
        keys.index(tile % KEY_TILES),
        q.permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def _key_mask(index_row_ptr, key_offs, num_keys, num_rows):
    """Which keys of a tile there are, `[BLOCK_N]`."""
    rows = gl.load(index_row_ptr + key_offs, mask=key_offs < num_keys, other=-1)
    return (rows >= 0) & (rows < num_rows)


@gluon.jit
def _multiply_values(scores, key_mask, qk_scale, row_max, row_sums, acc, p, keys, tile):
    """Take one tile of scores into the softmax, and start the product of the values and
    its weights."""
    KEY_TILES: gl.constexpr = keys.shape[0]
    logits = gl.where(key_mask[:, None], scores * qk_scale, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(logits, 0))  # [BLOCK_H]
    rescale = gl.exp2(row_max - new_max)  # [BLOCK_H]
    weights = gl.exp2(logits - new_max[None, :])  # [BLOCK_N, BLOCK_H]
    row_sums = row_sums * rescale[None, :] + weights
    p.store(weights.to(gl.bfloat16))
    fence_async_shared()
    sums = warpgroup_mma(
        keys.index(tile % KEY_TILES).permute((1, 0)),
        p,
        acc * rescale[None, :],
        is_async=True,
    )
    return sums, new_max, row_sums


@gluon.jit
def _attend_blocks(
    keys,
    filled,
    free,
    indices_ptr,
    lens_ptr,
    num_blocks,
    num_head_blocks,
    width,
    num_rows,
    indices_stride,
    q_ptr,
    q_token_stride,
    q_head_stride,
    num_heads,
    qk_scale,
    sink_ptr,
    out_ptr,
    out_token_stride,
    out_head_stride,
    HAS_LENS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    BLOCK_H: gl.constexpr,
    EMPTY_MAX: gl.constexpr,
):
    BLOCK_N: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    # Of the scores, and of the sums, [HEAD_DIM, BLOCK_H].
    product_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_H, 16]
    )
    of_heads: gl.constexpr = gl.SliceLayout(0, product_layout)
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    q = gl.allocate_shared_memory(
        gl.bfloat16, [BLOCK_H, HEAD_DIM], gl.NVMMASharedLayout(128, 16)
    )
    p = gl.allocate_shared_memory(
        gl.bfloat16, [BLOCK_N, BLOCK_H], gl.NVMMASharedLayout(2 * BLOCK_H, 16)
    )
    tile_offs = gl.arange(0, BLOCK_N, gl.SliceLayout(1, product_layout))
    dim_offs = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, rows_layout))
    zeros = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, product_layout)
    first_tile = gl.to_tensor(0)
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        token = (block // num_head_blocks).to(gl.int64)
        first_head = block % num_head_blocks * BLOCK_H
        num_keys = num_keys_of(lens_ptr, token, width, HAS_LENS)
        index_row_ptr = indices_ptr + token * indices_stride
        head_offs = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, rows_layout))
        row_mask = (head_offs < num_heads)[:, None]
        q_row_ptrs = q_ptr + token * q_token_stride
        q_row_ptrs = q_row_ptrs + head_offs.to(gl.int64)[:, None] * q_head_stride
        q.store(gl.load(q_row_ptrs + dim_offs[None, :], mask=row_mask, other=0.0))
        fence_async_shared()

        row_max = gl.full([BLOCK_H], EMPTY_MAX, gl.float32, of_heads)
        row_sums = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, product_layout)
        acc = gl.zeros([HEAD_DIM, BLOCK_H], gl.float32, product_layout)
        last_tile = first_tile + gl.maximum(gl.cdiv(num_keys, BLOCK_N), 1) - 1
        product = _multiply_scores(q, keys, filled, first_tile, zeros)
        key_offs = tile_offs
        key_mask = _key_mask(index_row_ptr, key_offs, num_keys, num_rows)
        scores = warpgroup_mma_wait(0, deps=(product,))
        for tile in range(first_tile, last_tile):
            sums, row_max, row_sums = _multiply_values(
                scores, key_mask, qk_scale, row_max, row_sums, acc, p, keys, tile
            )
            product = _multiply_scores(q, keys, filled, tile + 1, zeros)
            key_offs += BLOCK_N
            key_mask = _key_mask(index_row_ptr, key_offs, num_keys, num_rows)
            acc = warpgroup_mma_wait(1, deps=(sums,))
            hand_over(free, tile)
            scores = warpgroup_mma_wait(0, deps=(product,))
        sums, row_max, row_sums = _multiply_values(
            scores, key_mask, qk_scale, row_max, row_sums, acc, p, keys, last_tile
        )
        acc = warpgroup_mma_wait(0, deps=(sums,))
        hand_over(free, last_tile)
        first_tile = last_tile + 1

        # Behind the product: the sums over warps lie where `p` was.
        row_sum = gl.sum(row_sums, 0)  # [BLOCK_H]
        row_heads = first_head + gl.arange(0, BLOCK_H, of_heads)
        factor = softmax_factor(
            row_max, row_sum, sink_ptr, row_heads, row_heads < num_heads, HAS_SINK
        )
        # Rows of the output take the place of q.
        q.permute((1, 0)).store((acc * factor[None, :]).to(gl.bfloat16))
        out_row_ptrs = out_ptr + token * out_token_stride
        out_row_ptrs = out_row_ptrs + head_offs.to(gl.int64)[:, None] * out_head_stride
        gl.store(out_row_ptrs + dim_offs[None, :], q.load(rows_layout), mask=row_mask)


@gluon.jit(do_not_specialize=["num_blocks", "num_rows", "width", "indices_stride"])
def few_heads_kernel(
    num_blocks,
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
    HAS_LENS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KEY_TILES: gl.constexpr = KEY_TILES,
    HEAD_DIM: gl.constexpr = HEAD_DIM,
    EMPTY_MAX: gl.constexpr = EMPTY_MAX,
    FILL_THREADS: gl.constexpr = FILL_THREADS,
    FILL_REGISTERS: gl.constexpr = FILL_REGISTERS,
):
    """As `hopper_prefill_kernel`: one block of heads after another."""
    num_head_blocks = gl.cdiv(num_heads, BLOCK_H)
    keys, _, filled, free = key_tiles(KEY_TILES, BLOCK_N, HEAD_DIM, FILL_THREADS)
    gl.warp_specialize(
        [
            (
                _attend_blocks,
                (
                    keys,
                    filled,
                    free,
                    indices_ptr,
                    lens_ptr,
                    num_blocks,
                    num_head_blocks,
                    width,
                    num_rows,
                    indices_stride,
                    q_ptr,
                    q_token_stride,
                    q_head_stride,
                    num_heads,
                    qk_scale,
                    sink_ptr,
                    out_ptr,
                    out_token_stride,
                    out_head_stride,
                    HAS_LENS,
                    HAS_SINK,
                    BLOCK_H,
                    EMPTY_MAX,
                ),
            ),
            (
                fill,
                (
                    keys,
                    None,
                    filled,
                    free,
                    kv_ptr,
                    indices_ptr,
                    lens_ptr,
                    num_blocks,
                    num_head_blocks,
                    width,
                    num_rows,
                    kv_stride,
                    indices_stride,
                    HAS_LENS,
                ),
            ),
        ],
        [FILL_THREADS // 32],
        [FILL_REGISTERS],
    )
