# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse prefill on Hopper, in Gluon, to bf16: 64 heads at a time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from ..xpu_dsv4._pages import HEAD_DIM
from ..xpu_dsv4._softmax import EMPTY_MAX
from ._hopper_attend import (
    FILL_REGISTERS,
    FILL_THREADS,
    KEY_TILES,
    attend,
    hand_over,
    key_tiles,
)


@gluon.jit
def num_keys_of(lens_ptr, token, width, HAS_LENS: gl.constexpr):
    """Entries of a token's row of indices that count."""
    if HAS_LENS:
        given_keys = gl.load(lens_ptr + token)
        num_keys = gl.minimum(gl.maximum(given_keys, 0), width).to(gl.int32)
    else:
        num_keys = width
    return num_keys


@gluon.jit
def fill(
    keys,
    valid,
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
    HAS_LENS: gl.constexpr,
):
    """Copy the keys of a program's blocks, tile by tile, each as soon as one is free.

    `valid` is None where those that multiply look for the keys themselves.
    """
    KEY_TILES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    # Eight lanes read 128 bytes of a key, so that a thread has few addresses.
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile_offs = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copy))  # [BLOCK_N]
    all_offs = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, copy))  # [HEAD_DIM]
    tile = gl.to_tensor(0)
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        token = (block // num_head_blocks).to(gl.int64)
        num_keys = num_keys_of(lens_ptr, token, width, HAS_LENS)
        index_row_ptr = indices_ptr + token * indices_stride
        for start in range(0, gl.maximum(num_keys, 1), BLOCK_N):
            offs = start + tile_offs  # [BLOCK_N]
            rows = gl.load(index_row_ptr + offs, mask=offs < num_keys, other=-1)
            valid_mask = (rows >= 0) & (rows < num_rows)  # [BLOCK_N]
            row_ptrs = kv_ptr + rows.to(gl.int64) * kv_stride  # [BLOCK_N]
            mbarrier.wait(free.index(tile % KEY_TILES), (tile // KEY_TILES + 1) % 2)
            if valid is not None:
                valid.index(tile % KEY_TILES).store(valid_mask.to(gl.int32))
            async_copy.async_copy_global_to_shared(
                keys.index(tile % KEY_TILES),
                row_ptrs[:, None] + all_offs[None, :],
                mask=valid_mask[:, None],
            )
            async_copy.mbarrier_arrive(
                filled.index(tile % KEY_TILES), increment_count=False
            )
            if valid is not None:
                # The copies arrive by themselves; this is for what is stored.
                hand_over(filled, tile)
            tile += 1


@gluon.jit(do_not_specialize=["num_blocks", "num_rows", "width", "indices_stride"])
def hopper_prefill_kernel(
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
    """As `_prefill_kernel`: one block of heads of one token."""
    num_head_blocks = gl.cdiv(num_heads, BLOCK_H)
    token = (gl.program_id(0) // num_head_blocks).to(gl.int64)
    keys, valid, filled, free = key_tiles(
        KEY_TILES, BLOCK_N, HEAD_DIM, FILL_THREADS + 1
    )
    gl.warp_specialize(
        [
            (
                attend,
                (
                    keys,
                    valid,
                    filled,
                    free,
                    num_keys_of(lens_ptr, token, width, HAS_LENS),
                    q_ptr + token * q_token_stride,
                    q_head_stride,
                    gl.program_id(0) % num_head_blocks * BLOCK_H,
                    num_heads,
                    qk_scale,
                    sink_ptr,
                    out_ptr + token * out_token_stride,
                    out_head_stride,
                    None,
                    None,
                    1,
                    HAS_SINK,
                    False,
                    BLOCK_H,
                    EMPTY_MAX,
                ),
            ),
            (
                fill,
                (
                    keys,
                    valid,
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
