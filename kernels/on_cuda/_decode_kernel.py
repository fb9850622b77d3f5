# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse decode on CUDA: heads first, with the whole of q and of a tile of keys."""

from ..xpu_dsv4._decode_keys import load_slots
from ..xpu_dsv4._output import store_heads
from ..xpu_dsv4._pages import HEAD_DIM
from ..xpu_dsv4._softmax import EMPTY_MAX, softmax_factor
from ..xpu_dsv4._triton import tl, triton
from ._packed_keys import load_packed_tile, unpack_keys
from ._softmax_step import softmax_weights


@triton.jit(
    do_not_specialize=[
        "topk_width",
        "num_splits",
        "num_kv_slots",
        "num_swa_slots",
        "topk_stride",
        "group_tokens",
        "max_position",
    ],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def _decode_kernel(
    q_ptr,
    kv_ptr,
    swa_ptr,
    topk_indices_ptr,
    topk_lens_ptr,
    swa_indices_ptr,
    swa_lens_ptr,
    sink_ptr,
    out_ptr,
    partial_ptr,
    num_heads,
    topk_width,
    swa_width,
    num_splits,
    num_kv_slots,
    num_swa_slots,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_block_stride,
    swa_block_stride,
    topk_stride,
    swa_stride,
    qk_scale,
    scales_ptr,
    positions_ptr,
    cos_sin_ptr,
    group_tokens,
    max_position,
    cos_sin_stride,
    KV_BLOCK_SIZE: tl.constexpr,
    SWA_BLOCK_SIZE: tl.constexpr,
    HAS_TOPK: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
):
    """As the kernel of `xpu_dsv4`: one block of heads of one token, over one split.

    All 512 dims of a tile of keys are one operand, and the next tile is loaded while
    one is multiplied. Q_BLOCKS is not read.
    """
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    program = tl.program_id(0)
    head_block = program % num_head_blocks
    # With one split, too, this makes 128 heads 2 to 5 % faster.
    split = (program // num_head_blocks) % num_splits
    token = (program // num_head_blocks // num_splits).to(tl.int64)

    head_offs = head_block * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    all_offs = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    tile_offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]

    row_mask = head_mask[:, None]  # [BLOCK_H, 1]
    token_q_ptr = q_ptr + token * q_token_stride

    if HAS_TOPK:
        given_topk_len = tl.load(topk_lens_ptr + token)
        topk_len = tl.minimum(tl.maximum(given_topk_len, 0), topk_width).to(tl.int32)
    else:
        topk_len = tl.full((), 0, tl.int32)
    given_swa_len = tl.load(swa_lens_ptr + token)
    swa_len = tl.minimum(tl.maximum(given_swa_len, 0), swa_width).to(tl.int32)
    num_keys = topk_len + swa_len
    keys_per_split = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), num_splits) * BLOCK_N
    first_key = split * keys_per_split
    last_key = tl.minimum(first_key + keys_per_split, num_keys)

    topk_row_ptr = topk_indices_ptr + token * topk_stride
    swa_row_ptr = swa_indices_ptr + token * swa_stride

    row_max = tl.full([BLOCK_H], EMPTY_MAX, tl.float32)  # [BLOCK_H]
    column_sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # [BLOCK_H, BLOCK_N]
    acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)  # [BLOCK_H, HEAD_DIM]

    # [BLOCK_N]
    slots = load_slots(
        topk_row_ptr,
        swa_row_ptr,
        first_key + tile_offs,
        topk_len,
        last_key,
        num_kv_slots,
        num_swa_slots,
        HAS_TOPK,
    )
    # [BLOCK_N, 16, 8], [BLOCK_N, 16], and [BLOCK_N] twice
    codes, rope, low, high = load_packed_tile(
        slots,
        first_key + tile_offs,
        topk_len,
        kv_ptr,
        swa_ptr,
        kv_block_stride,
        swa_block_stride,
        KV_BLOCK_SIZE,
        SWA_BLOCK_SIZE,
        HAS_TOPK,
    )
    # [BLOCK_H, 1]
    q_row_ptrs = token_q_ptr + head_offs.to(tl.int64)[:, None] * q_head_stride
    # [BLOCK_H, HEAD_DIM]
    q = tl.load(q_row_ptrs + all_offs[None, :], mask=row_mask, other=0.0)
    for start in range(first_key, last_key, BLOCK_N):
        key_offs = start + tile_offs  # [BLOCK_N]
        # One tile ahead, so that the loads of this tile's pages do not wait for it.
        # [BLOCK_N]
        next_slots = load_slots(
            topk_row_ptr,
            swa_row_ptr,
            key_offs + BLOCK_N,
            topk_len,
            last_key,
            num_kv_slots,
            num_swa_slots,
            HAS_TOPK,
        )
        kv = unpack_keys(codes, rope, low, high)  # [BLOCK_N, HEAD_DIM]
        # Read again: the scores need it in another layout than the loads of pages, and
        # the slots of the next tile would be kept in both. [BLOCK_N]
        score_mask = (
            load_slots(
                topk_row_ptr,
                swa_row_ptr,
                key_offs,
                topk_len,
                last_key,
                num_kv_slots,
                num_swa_slots,
                HAS_TOPK,
            )
            >= 0
        )
        # The next tile comes while this one is multiplied.
        # [BLOCK_N, 16, 8], [BLOCK_N, 16], and [BLOCK_N] twice
        codes, rope, low, high = load_packed_tile(
            next_slots,
            key_offs + BLOCK_N,
            topk_len,
            kv_ptr,
            swa_ptr,
            kv_block_stride,
            swa_block_stride,
            KV_BLOCK_SIZE,
            SWA_BLOCK_SIZE,
            HAS_TOPK,
        )
        scores = tl.dot(q, tl.trans(kv))  # [BLOCK_H, BLOCK_N]
        # `_prefill_kernel` says what the branch is for.
        weights = scores  # [BLOCK_H, BLOCK_N]
        rescale = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
        if start < last_key:
            weights, rescale, row_max = softmax_weights(
                scores, score_mask, qk_scale, row_max
            )
            column_sums = column_sums * rescale[:, None] + weights
        acc = tl.dot(weights.to(tl.bfloat16), kv, acc * rescale[:, None])

        slots = next_slots

    row_sum = tl.sum(column_sums, 1)  # [BLOCK_H]
    if SPLIT:
        row_offs = (token * num_heads + head_offs) * num_splits + split  # [BLOCK_H]
        programs_per_token = num_head_blocks * num_splits
        num_tokens = (tl.num_programs(0) // programs_per_token).to(tl.int64)
        # [BLOCK_H]
        state_ptrs = (
            partial_ptr + num_tokens * num_heads * num_splits * HEAD_DIM + row_offs * 2
        )
        tl.store(state_ptrs, row_max, mask=head_mask)
        tl.store(state_ptrs + 1, row_sum, mask=head_mask)
        part_row_ptrs = partial_ptr + row_offs[:, None] * HEAD_DIM  # [BLOCK_H, 1]
        part_mask = row_mask & (first_key < last_key)  # [BLOCK_H, 1]
        tl.store(part_row_ptrs + all_offs[None, :], acc, mask=part_mask)
    else:
        # [BLOCK_H, 1]
        factor = softmax_factor(
            row_max, row_sum, sink_ptr, head_offs, head_mask, HAS_SINK
        )[:, None]
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
