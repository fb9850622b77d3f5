# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fused sparse-decode kernel: from FP8 pages to attention, or to partials of it."""

from .._fp8 import (
    dequantize,
    load_exponents,
    load_nope_codes,
    load_rope,
)
from .._pages import HEAD_DIM, QUANT_BLOCK
from .._softmax import EMPTY_MAX
from .._triton import tl, triton
from ._decode_keys import key_pointers, load_slots
from ._dims_first import (
    attend,
    query_pointers,
    range_behind_loop,
    store_accumulators,
    zero_accumulator,
)


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
    QUANT_BLOCK: tl.constexpr = QUANT_BLOCK,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
):
    """One block of heads of one token, over one split of its keys."""
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    program = tl.program_id(0)
    head_block = program % num_head_blocks
    # Without splits, arithmetic on `num_splits` would take registers that the loop over
    # keys lacks.
    if SPLIT:
        split = (program // num_head_blocks) % num_splits
        token = (program // num_head_blocks // num_splits).to(tl.int64)
    else:
        token = (program // num_head_blocks).to(tl.int64)

    head_offs = head_block * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    dim_offs = tl.arange(0, QUANT_BLOCK)  # [64]
    tile_offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]

    row_mask = head_mask[:, None]  # [BLOCK_H, 1]
    token_q_ptr = q_ptr + token * q_token_stride
    # [BLOCK_H, 64]
    q_ptrs = query_pointers(
        token_q_ptr,
        head_offs,
        head_block * BLOCK_H,
        num_heads,
        q_head_stride,
        BLOCK_H,
        Q_BLOCKS,
    )

    if HAS_TOPK:
        given_topk_len = tl.load(topk_lens_ptr + token)
        topk_len = tl.minimum(tl.maximum(given_topk_len, 0), topk_width).to(tl.int32)
    else:
        topk_len = tl.full((), 0, tl.int32)
    given_swa_len = tl.load(swa_lens_ptr + token)
    swa_len = tl.minimum(tl.maximum(given_swa_len, 0), swa_width).to(tl.int32)
    num_keys = topk_len + swa_len
    if SPLIT:
        keys_per_split = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), num_splits) * BLOCK_N
        first_key = split * keys_per_split
        last_key = tl.minimum(first_key + keys_per_split, num_keys)
    else:
        first_key = 0
        last_key = num_keys

    topk_row_ptr = topk_indices_ptr + token * topk_stride
    swa_row_ptr = swa_indices_ptr + token * swa_stride

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
        key_mask = slots >= 0  # [BLOCK_N]
        # [BLOCK_N] each
        data_ptrs, scale_ptrs = key_pointers(
            slots,
            key_offs,
            topk_len,
            kv_ptr,
            swa_ptr,
            kv_block_stride,
            swa_block_stride,
            KV_BLOCK_SIZE,
            SWA_BLOCK_SIZE,
            HAS_TOPK,
        )
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
        codes0 = load_nope_codes(data_ptrs, dim_offs, key_mask, 0)  # [BLOCK_N, 64]
        codes1 = load_nope_codes(data_ptrs, dim_offs, key_mask, 1)  # [BLOCK_N, 64]
        codes2 = load_nope_codes(data_ptrs, dim_offs, key_mask, 2)  # [BLOCK_N, 64]
        codes3 = load_nope_codes(data_ptrs, dim_offs, key_mask, 3)  # [BLOCK_N, 64]
        codes4 = load_nope_codes(data_ptrs, dim_offs, key_mask, 4)  # [BLOCK_N, 64]
        codes5 = load_nope_codes(data_ptrs, dim_offs, key_mask, 5)  # [BLOCK_N, 64]
        codes6 = load_nope_codes(data_ptrs, dim_offs, key_mask, 6)  # [BLOCK_N, 64]
        k7 = load_rope(data_ptrs, dim_offs, key_mask)  # [BLOCK_N, 64]
        exponents = load_exponents(scale_ptrs, key_mask)[:, None]  # [BLOCK_N, 1]
        k0 = dequantize(codes0, exponents, 0)  # [BLOCK_N, 64]
        k1 = dequantize(codes1, exponents, 1)  # [BLOCK_N, 64]
        k2 = dequantize(codes2, exponents, 2)  # [BLOCK_N, 64]
        k3 = dequantize(codes3, exponents, 3)  # [BLOCK_N, 64]
        k4 = dequantize(codes4, exponents, 4)  # [BLOCK_N, 64]
        k5 = dequantize(codes5, exponents, 5)  # [BLOCK_N, 64]
        k6 = dequantize(codes6, exponents, 6)  # [BLOCK_N, 64]
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
            score_mask,
            qk_scale,
            start,
            last_key,
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
        slots = next_slots

    row_sum = tl.sum(column_sums, 1)  # [BLOCK_H]
    head_offs = head_block * BLOCK_H + range_behind_loop(BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    row_mask = head_mask[:, None]  # [BLOCK_H, 1]
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
        part_ptrs = part_row_ptrs + dim_offs[None, :]  # [BLOCK_H, 64]
        tl.store(part_ptrs + 0 * QUANT_BLOCK, tl.trans(acc0), mask=part_mask)
        tl.store(part_ptrs + 1 * QUANT_BLOCK, tl.trans(acc1), mask=part_mask)
        tl.store(part_ptrs + 2 * QUANT_BLOCK, tl.trans(acc2), mask=part_mask)
        tl.store(part_ptrs + 3 * QUANT_BLOCK, tl.trans(acc3), mask=part_mask)
        tl.store(part_ptrs + 4 * QUANT_BLOCK, tl.trans(acc4), mask=part_mask)
        tl.store(part_ptrs + 5 * QUANT_BLOCK, tl.trans(acc5), mask=part_mask)
        tl.store(part_ptrs + 6 * QUANT_BLOCK, tl.trans(acc6), mask=part_mask)
        tl.store(part_ptrs + 7 * QUANT_BLOCK, tl.trans(acc7), mask=part_mask)
    else:
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
