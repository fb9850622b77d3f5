# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse prefill on CUDA: heads first, with the whole of q and of a tile of keys."""

from ..xpu_dsv4._output import store_heads
from ..xpu_dsv4._pages import HEAD_DIM
from ..xpu_dsv4._softmax import EMPTY_MAX, softmax_factor
from ..xpu_dsv4._triton import tl, triton
from ._softmax_step import softmax_step, softmax_weights

WGMMA_ROWS = 64
"""Heads from which Hopper's asynchronous matrix instructions take a block."""


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
    PACKED_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
    WGMMA_ROWS: tl.constexpr = WGMMA_ROWS,
):
    """As the kernel of `xpu_dsv4`: one block of heads of one token.

    PACKED_KEYS says that `kv_stride` is HEAD_DIM, so that addresses take little.
    Q_BLOCKS is not read.
    """
    SCORES_FIRST: tl.constexpr = BLOCK_H >= WGMMA_ROWS
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // num_head_blocks).to(tl.int64)
    first_head = (tl.program_id(0) % num_head_blocks) * BLOCK_H
    head_offs = first_head + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    tile_offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    all_offs = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]

    row_mask = head_mask[:, None]  # [BLOCK_H, 1]
    token_q_ptr = q_ptr + token * q_token_stride
    # [BLOCK_H, 1]
    q_row_ptrs = token_q_ptr + head_offs.to(tl.int64)[:, None] * q_head_stride
    # [BLOCK_H, HEAD_DIM]
    q = tl.load(q_row_ptrs + all_offs[None, :], mask=row_mask, other=0.0)

    if HAS_LENS:
        given_keys = tl.load(lens_ptr + token)
        num_keys = tl.minimum(tl.maximum(given_keys, 0), width).to(tl.int32)
    else:
        num_keys = width

    row_max = tl.full([BLOCK_H], EMPTY_MAX, tl.float32)  # [BLOCK_H]
    if SCORES_FIRST:
        column_sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # [BLOCK_H, BLOCK_N]
        acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)  # [BLOCK_H, HEAD_DIM]
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # [BLOCK_H, BLOCK_N]
        # Fewer instructions, and registers that the accumulators need.
        tl.assume(num_rows >= 0)
        tl.assume(width >= 0)
        if PACKED_KEYS:
            kv_stride = HEAD_DIM
    else:
        row_sum = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
        acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)  # [BLOCK_H, HEAD_DIM]
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
        if SCORES_FIRST:
            # [BLOCK_N, HEAD_DIM]
            kv = tl.load(kv_row_ptrs + all_offs[None, :], mask=kv_mask, other=0.0)
            # Triton 3.6 puts the loads of the next tile behind the last product outside
            # a branch, and waits for a product only in the branch that uses it. So the
            # tensor cores multiply while the next tile is requested, and softmax and PV
            # hide its way. The branch is always taken.
            scores = tl.dot(q, tl.trans(kv))  # [BLOCK_H, BLOCK_N]
            # Loaded again: kept from the last tile, these would take registers.
            own_offs = start + tile_offs  # [BLOCK_N]
            own_rows = tl.load(
                index_row_ptr + own_offs, mask=own_offs < num_keys, other=-1
            )  # [BLOCK_N]
            own_mask = (own_rows >= 0) & (own_rows < num_rows)  # [BLOCK_N]
            if start < num_keys:
                # The inner branch, always taken as well, hides that one product feeds
                # the other. Where the compiler sees it, it lays the scores over all
                # warps by rows, and both warp groups compute every score. `p` must not
                # use the scores before: ptxas would wait for each of their products.
                p = tl.zeros([BLOCK_H, BLOCK_N], tl.bfloat16)  # [BLOCK_H, BLOCK_N]
                rescale = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
                if start >= 0:
                    # [BLOCK_H, BLOCK_N], then [BLOCK_H] each
                    weights, rescale, row_max = softmax_weights(
                        scores, own_mask, qk_scale, row_max
                    )
                    column_sums = column_sums * rescale[:, None] + weights
                    p = weights.to(tl.bfloat16)
                acc = tl.dot(p, kv, acc * rescale[:, None])
        else:
            # [BLOCK_N, HEAD_DIM]
            kv = tl.load(kv_row_ptrs + all_offs[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(kv))  # [BLOCK_H, BLOCK_N]
            # The branch is for Triton on CUDA, measured with 3.6. Where the compiler
            # sees that one product feeds another, it lays the scores over all warps by
            # rows: with 64 heads both warp groups then compute every score. The branch
            # hides this. It is always taken, but `p` must use the scores on both paths.
            p = scores.to(tl.bfloat16)  # [BLOCK_H, BLOCK_N]
            rescale = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
            if start < num_keys:
                p, rescale, row_max, row_sum = softmax_step(
                    scores, valid_mask, qk_scale, row_max, row_sum
                )
            acc = tl.dot(p, kv, acc * rescale[:, None])

    if SCORES_FIRST:
        row_sum = tl.sum(column_sums, 1)  # [BLOCK_H]
        # Never taken. The use of `scores` makes the loop carry them, and only then
        # does Triton 3.6 wait for their product inside the branch.
        if num_keys < 0:
            row_sum += tl.sum(scores, 1)
    # [BLOCK_H, 1]
    factor = softmax_factor(row_max, row_sum, sink_ptr, head_offs, head_mask, HAS_SINK)[
        :, None
    ]
    store_heads(
        acc * factor,
        head_offs,
        head_mask,
        0,
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
        HEADS_PER_GROUP,
        BLOCK_H,
        HEAD_DIM,
    )
