# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sparse-prefill kernel: attention over gathered bf16 keys."""

from .._softmax import EMPTY_MAX
from .._triton import tl, triton
from ._dims_first import (
    TILE_DIM,
    attend,
    query_pointers,
    range_behind_loop,
    store_accumulators,
    zero_accumulator,
)


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
def _prefill_kernel(
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
    Q_BLOCKS: tl.constexpr,
    TILE_DIM: tl.constexpr = TILE_DIM,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
):
    """One block of heads of one token."""
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // num_head_blocks).to(tl.int64)
    first_head = (tl.program_id(0) % num_head_blocks) * BLOCK_H
    head_offs = first_head + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    tile_offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    dim_offs = tl.arange(0, TILE_DIM)  # [64]

    row_mask = head_mask[:, None]  # [BLOCK_H, 1]
    token_q_ptr = q_ptr + token * q_token_stride
    # [BLOCK_H, 64]
    q_ptrs = query_pointers(
        token_q_ptr,
        head_offs,
        first_head,
        num_heads,
        q_head_stride,
        BLOCK_H,
        Q_BLOCKS,
    )

    if HAS_LENS:
        given_keys = tl.load(lens_ptr + token)
        num_keys = tl.minimum(tl.maximum(given_keys, 0), width).to(tl.int32)
    else:
        num_keys = width

    row_max = tl.full([BLOCK_H], EMPTY_MAX, tl.float32)  # [BLOCK_H]
    column_sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # [BLOCK_H, BLOCK_N]
    # [64, BLOCK_H] each
    acc0 = zero_accumulator(BLOCK_H)
    acc1 = zero_accumulator(BLOCK_H)
    acc2 = zero_accumulator(BLOCK_H)
    acc3 = zero_accumulator(BLOCK_H)
    acc4 = zero_accumulator(BLOCK_H)
    acc5 = zero_accumulator(BLOCK_H)
    acc6 = zero_accumulator(BLOCK_H)
    acc7 = zero_accumulator(BLOCK_H)
    index_row_ptr = indices_ptr + token * indices_stride
    # [BLOCK_N]
    next_rows = tl.load(index_row_ptr + tile_offs, mask=tile_offs < num_keys, other=-1)
    for start in range(0, num_keys, BLOCK_N):
        rows = next_rows  # [BLOCK_N]
        # One tile ahead, so that the loads of this tile's keys do not wait for it.
        next_offs = start + BLOCK_N + tile_offs  # [BLOCK_N]
        next_rows = tl.load(
            index_row_ptr + next_offs, mask=next_offs < num_keys, other=-1
        )
        valid_mask = (rows >= 0) & (rows < num_rows)  # [BLOCK_N]
        kv_row_ptrs = (kv_ptr + rows.to(tl.int64) * kv_stride)[:, None]  # [BLOCK_N, 1]
        kv_mask = valid_mask[:, None]  # [BLOCK_N, 1]
        k_ptrs = kv_row_ptrs + dim_offs[None, :]  # [BLOCK_N, 64]
        # [BLOCK_N, 64] each
        k0 = tl.load(k_ptrs + 0 * TILE_DIM, mask=kv_mask, other=0.0)
        k1 = tl.load(k_ptrs + 1 * TILE_DIM, mask=kv_mask, other=0.0)
        k2 = tl.load(k_ptrs + 2 * TILE_DIM, mask=kv_mask, other=0.0)
        k3 = tl.load(k_ptrs + 3 * TILE_DIM, mask=kv_mask, other=0.0)
        k4 = tl.load(k_ptrs + 4 * TILE_DIM, mask=kv_mask, other=0.0)
        k5 = tl.load(k_ptrs + 5 * TILE_DIM, mask=kv_mask, other=0.0)
        k6 = tl.load(k_ptrs + 6 * TILE_DIM, mask=kv_mask, other=0.0)
        k7 = tl.load(k_ptrs + 7 * TILE_DIM, mask=kv_mask, other=0.0)
        (
            row_max,
            column_sums,
            acc0,
            acc1,
            acc2,
            acc3,
            acc4,
            acc5,
            acc6,
            acc7,
        ) = attend(
            q_ptrs,
            row_mask,
            k0,
            k1,
            k2,
            k3,
            k4,
            k5,
            k6,
            k7,
            valid_mask,
            qk_scale,
            start,
            num_keys,
            row_max,
            column_sums,
            acc0,
            acc1,
            acc2,
            acc3,
            acc4,
            acc5,
            acc6,
            acc7,
            BLOCK_H,
            BLOCK_N,
            Q_BLOCKS,
        )

    head_offs = first_head + range_behind_loop(BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    row_sum = tl.sum(column_sums, 1)  # [BLOCK_H]
    store_accumulators(
        acc0,
        acc1,
        acc2,
        acc3,
        acc4,
        acc5,
        acc6,
        acc7,
        row_max,
        row_sum,
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
        BLOCK_H,
    )
