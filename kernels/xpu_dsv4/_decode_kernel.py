# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fused sparse-decode kernel: FP8 page tokens in, attention or partials out."""

from ._fp8 import (
    dequantize,
    load_exponents,
    load_nope_codes,
    load_rope,
    token_pointers,
)
from ._softmax import finish, softmax_step
from ._triton import tl, triton


@triton.jit
def _load_slots(
    topk_row_ptr,
    swa_row_ptr,
    position,
    topk_len,
    last,
    kv_slots,
    swa_slots,
    HAS_TOPK: tl.constexpr,
):
    """int32 slots of the keys at `position`: the top-k's first, then the window's.

    -1 stands for a position past `last` and for an index outside its cache.
    """
    in_swa = (position >= topk_len) & (position < last)
    slot = tl.load(swa_row_ptr + (position - topk_len), mask=in_swa, other=-1)
    slot = tl.where((slot >= 0) & (slot < swa_slots), slot, -1).to(tl.int32)
    if HAS_TOPK:
        in_topk = (position < topk_len) & (position < last)
        topk = tl.load(topk_row_ptr + position, mask=in_topk, other=-1)
        topk = tl.where((topk >= 0) & (topk < kv_slots), topk, -1).to(tl.int32)
        slot = tl.where(in_topk, topk, slot)
    return slot


@triton.jit
def _add_values(o, p, v, rescale, some, GUARD_PV: tl.constexpr):
    """O * rescale + p @ v; GUARD_PV puts the product in a region of its own."""
    o *= rescale[:, None]
    if GUARD_PV:
        if some:
            o = tl.dot(p, v, o)
    else:
        o = tl.dot(p, v, o)
    return o


@triton.jit(do_not_specialize=["num_splits"])
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
    kv_slots,
    swa_slots,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_block_stride,
    swa_block_stride,
    topk_stride,
    swa_stride,
    qk_scale,
    KV_BLOCK_SIZE: tl.constexpr,
    SWA_BLOCK_SIZE: tl.constexpr,
    HAS_TOPK: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
    GUARD_PV: tl.constexpr,
):
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    program = tl.program_id(0) // HALVES
    half = tl.program_id(0) % HALVES
    head_block = program % head_blocks
    split = (program // head_blocks) % num_splits
    token = (program // head_blocks // num_splits).to(tl.int64)

    heads = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = heads < num_heads
    dims = tl.arange(0, 64)
    keys = tl.arange(0, BLOCK_N)

    q_rows = q_ptr + token * q_token_stride + heads.to(tl.int64) * q_head_stride
    q_tile = q_rows[:, None] + dims[None, :]
    q_mask = head_mask[:, None]
    q0 = tl.load(q_tile, mask=q_mask, other=0.0)
    q1 = tl.load(q_tile + 64, mask=q_mask, other=0.0)
    q2 = tl.load(q_tile + 128, mask=q_mask, other=0.0)
    q3 = tl.load(q_tile + 192, mask=q_mask, other=0.0)
    q4 = tl.load(q_tile + 256, mask=q_mask, other=0.0)
    q5 = tl.load(q_tile + 320, mask=q_mask, other=0.0)
    q6 = tl.load(q_tile + 384, mask=q_mask, other=0.0)
    q7 = tl.load(q_tile + 448, mask=q_mask, other=0.0)

    topk_len = 0
    if HAS_TOPK:
        topk_len = tl.load(topk_lens_ptr + token).to(tl.int32)
        topk_len = tl.minimum(tl.maximum(topk_len, 0), topk_width)
    swa_len = tl.load(swa_lens_ptr + token).to(tl.int32)
    swa_len = tl.minimum(tl.maximum(swa_len, 0), swa_width)
    num_keys = topk_len + swa_len
    per_split = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), num_splits) * BLOCK_N
    first = split * per_split
    last = tl.minimum(first + per_split, num_keys)

    topk_row_ptr = topk_indices_ptr + token * topk_stride
    swa_row_ptr = swa_indices_ptr + token * swa_stride

    row_max = tl.full([BLOCK_H], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    o0 = tl.zeros([BLOCK_H, 64], tl.float32)
    o1 = tl.zeros([BLOCK_H, 64], tl.float32)
    o2 = tl.zeros([BLOCK_H, 64], tl.float32)
    o3 = tl.zeros([BLOCK_H, 64], tl.float32)
    if HALVES == 1:
        o4 = tl.zeros([BLOCK_H, 64], tl.float32)
        o5 = tl.zeros([BLOCK_H, 64], tl.float32)
        o6 = tl.zeros([BLOCK_H, 64], tl.float32)
        o7 = tl.zeros([BLOCK_H, 64], tl.float32)

    slot = _load_slots(
        topk_row_ptr,
        swa_row_ptr,
        first + keys,
        topk_len,
        last,
        kv_slots,
        swa_slots,
        HAS_TOPK,
    )
    for start in range(first, last, BLOCK_N):
        position = start + keys
        next_slot = _load_slots(
            topk_row_ptr,
            swa_row_ptr,
            position + BLOCK_N,
            topk_len,
            last,
            kv_slots,
            swa_slots,
            HAS_TOPK,
        )
        valid = slot >= 0
        data, exponents_ptr = token_pointers(
            swa_ptr, slot, swa_block_stride, SWA_BLOCK_SIZE
        )
        if HAS_TOPK:
            in_topk = position < topk_len
            topk_data, topk_exponents_ptr = token_pointers(
                kv_ptr, slot, kv_block_stride, KV_BLOCK_SIZE
            )
            data = tl.where(in_topk, topk_data, data)
            exponents_ptr = tl.where(in_topk, topk_exponents_ptr, exponents_ptr)

        c0 = load_nope_codes(data, dims, valid, 0)
        c1 = load_nope_codes(data, dims, valid, 1)
        c2 = load_nope_codes(data, dims, valid, 2)
        c3 = load_nope_codes(data, dims, valid, 3)
        c4 = load_nope_codes(data, dims, valid, 4)
        c5 = load_nope_codes(data, dims, valid, 5)
        c6 = load_nope_codes(data, dims, valid, 6)
        k7 = load_rope(data, dims, valid)
        exponents = load_exponents(exponents_ptr, valid)[:, None]
        k0 = dequantize(c0, exponents, 0)
        k1 = dequantize(c1, exponents, 1)
        k2 = dequantize(c2, exponents, 2)
        k3 = dequantize(c3, exponents, 3)
        k4 = dequantize(c4, exponents, 4)
        k5 = dequantize(c5, exponents, 5)
        k6 = dequantize(c6, exponents, 6)

        score = tl.dot(q0, tl.trans(k0))
        score = tl.dot(q1, tl.trans(k1), score)
        score = tl.dot(q2, tl.trans(k2), score)
        score = tl.dot(q3, tl.trans(k3), score)
        score = tl.dot(q4, tl.trans(k4), score)
        score = tl.dot(q5, tl.trans(k5), score)
        score = tl.dot(q6, tl.trans(k6), score)
        score = tl.dot(q7, tl.trans(k7), score)

        p, rescale, row_max, row_sum = softmax_step(
            score, valid, qk_scale, row_max, row_sum
        )
        some = tl.max(valid.to(tl.int32), 0) > 0
        if HALVES == 1:
            o0 = _add_values(o0, p, k0, rescale, some, GUARD_PV)
            o1 = _add_values(o1, p, k1, rescale, some, GUARD_PV)
            o2 = _add_values(o2, p, k2, rescale, some, GUARD_PV)
            o3 = _add_values(o3, p, k3, rescale, some, GUARD_PV)
            o4 = _add_values(o4, p, k4, rescale, some, GUARD_PV)
            o5 = _add_values(o5, p, k5, rescale, some, GUARD_PV)
            o6 = _add_values(o6, p, k6, rescale, some, GUARD_PV)
            o7 = _add_values(o7, p, k7, rescale, some, GUARD_PV)
        else:
            if half == 0:
                o0 = _add_values(o0, p, k0, rescale, some, GUARD_PV)
                o1 = _add_values(o1, p, k1, rescale, some, GUARD_PV)
                o2 = _add_values(o2, p, k2, rescale, some, GUARD_PV)
                o3 = _add_values(o3, p, k3, rescale, some, GUARD_PV)
            else:
                o0 = _add_values(o0, p, k4, rescale, some, GUARD_PV)
                o1 = _add_values(o1, p, k5, rescale, some, GUARD_PV)
                o2 = _add_values(o2, p, k6, rescale, some, GUARD_PV)
                o3 = _add_values(o3, p, k7, rescale, some, GUARD_PV)

        slot = next_slot

    if SPLIT:
        row = (token * num_heads + heads) * num_splits + split
        programs = head_blocks * num_splits * HALVES
        num_tokens = (tl.num_programs(0) // programs).to(tl.int64)
        state = partial_ptr + num_tokens * num_heads * num_splits * 512 + row * 2
        tl.store(state, row_max, mask=head_mask)
        tl.store(state + 1, row_sum, mask=head_mask)
        target = partial_ptr + row[:, None] * 512 + half * 256 + dims[None, :]
        part_mask = q_mask & (first < last)
        tl.store(target, o0, mask=part_mask)
        tl.store(target + 64, o1, mask=part_mask)
        tl.store(target + 128, o2, mask=part_mask)
        tl.store(target + 192, o3, mask=part_mask)
        if HALVES == 1:
            tl.store(target + 256, o4, mask=part_mask)
            tl.store(target + 320, o5, mask=part_mask)
            tl.store(target + 384, o6, mask=part_mask)
            tl.store(target + 448, o7, mask=part_mask)
    else:
        factor = finish(row_max, row_sum, sink_ptr, heads, head_mask, HAS_SINK)[:, None]
        target = out_ptr + token * out_token_stride + half * 256
        target += heads.to(tl.int64)[:, None] * out_head_stride + dims[None, :]
        tl.store(target, (o0 * factor).to(tl.bfloat16), mask=q_mask)
        tl.store(target + 64, (o1 * factor).to(tl.bfloat16), mask=q_mask)
        tl.store(target + 128, (o2 * factor).to(tl.bfloat16), mask=q_mask)
        tl.store(target + 192, (o3 * factor).to(tl.bfloat16), mask=q_mask)
        if HALVES == 1:
            tl.store(target + 256, (o4 * factor).to(tl.bfloat16), mask=q_mask)
            tl.store(target + 320, (o5 * factor).to(tl.bfloat16), mask=q_mask)
            tl.store(target + 384, (o6 * factor).to(tl.bfloat16), mask=q_mask)
            tl.store(target + 448, (o7 * factor).to(tl.bfloat16), mask=q_mask)
