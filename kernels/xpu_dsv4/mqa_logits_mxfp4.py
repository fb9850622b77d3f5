# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Indexer scores over MXFP4 operands: score(q, k) = sum_h weight_h * relu(q_h . k).

An e2m1 value times the power of two of its block is exact in bf16: the products run
on bf16 matrix units and accumulate in fp32, and no scale remains afterwards.
"""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from ._fp4 import MXFP4_BLOCK, SCALES_A_WORD, mxfp4_to_bf16
from ._launch import launch_options
from ._logits import check_bounds, check_context, check_heads, key_pages, output
from ._triton import tl, triton


@triton.jit
def _score(
    keys,  # [DIM, KEYS] bf16
    q_ptr,
    scale_ptr,
    weight_ptr,
    alive,
    num_heads,
    q_stride_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted sum over heads of relu(query . keys), `[KEYS]`."""
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    real = (head < num_heads) & alive
    pairs = tl.load(
        q_ptr + head[:, None] * q_stride_head + dim[None, :] // 2,
        mask=real[:, None] & (dim[None, :] < DIM),
        other=0,
    ).to(tl.int32)  # [HEADS, DIM]
    word = tl.load(scale_ptr + head, mask=real, other=0)
    exponent = (word[:, None] >> (8 * (dim[None, :] // BLOCK))) & 0xFF
    q = mxfp4_to_bf16((pairs >> (4 * (dim[None, :] % 2))) & 15, exponent)
    weight = tl.load(weight_ptr + head, mask=real, other=0.0)
    products = tl.dot(q, keys)  # [HEADS, KEYS]
    return tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)


@triton.jit
def _mxfp4_mqa_logits_kernel(
    q_ptr,
    q_scale_ptr,
    kv_ptr,
    kv_scale_ptr,
    weight_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    num_rows,
    num_keys,
    num_heads,
    q_stride_row,
    q_stride_head,
    q_scale_stride,
    kv_stride,
    weight_stride,
    out_stride,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    tile = tl.program_id(1) * KEYS
    key = tile + tl.arange(0, KEYS)
    row = first + tl.arange(0, ROWS)
    starts = tl.load(start_ptr + row, mask=row < num_rows, other=num_keys)
    ends = tl.load(end_ptr + row, mask=row < num_rows, other=0)
    reached = (starts < tl.minimum(ends, tile + KEYS)) & (ends > tile)
    needed = tl.max(reached.to(tl.int32), axis=0) > 0
    present = (key < num_keys) & needed
    dim = tl.arange(0, DIM)
    pairs = tl.load(
        kv_ptr + key.to(tl.int64)[None, :] * kv_stride + dim[:, None] // 2,
        mask=present[None, :] & (dim[:, None] < DIM),
        other=0,
    ).to(tl.int32)
    word = tl.load(kv_scale_ptr + key, mask=present, other=0)
    exponent = (word[None, :] >> (8 * (dim[:, None] // BLOCK))) & 0xFF
    keys = mxfp4_to_bf16((pairs >> (4 * (dim[:, None] % 2))) & 15, exponent)
    for i in range(0, ROWS):
        r = (first + i).to(tl.int64)
        if r < num_rows:
            start = tl.load(start_ptr + r)
            end = tl.load(end_ptr + r)
            out = out_ptr + r * out_stride + key
            if (start < tl.minimum(end, tile + KEYS)) & (end > tile):
                score = _score(
                    keys,
                    q_ptr + r * q_stride_row,
                    q_scale_ptr + r * q_scale_stride,
                    weight_ptr + r * weight_stride,
                    r < num_rows,
                    num_heads,
                    q_stride_head,
                    HEADS,
                    DIM,
                    BLOCK,
                )
                inside = present & (key >= start) & (key < end)
                value = tl.where(inside, score, -float("inf"))
                tl.store(out, value, mask=key < num_keys)
            else:
                tl.store(out, -float("inf"), mask=key < num_keys)


@triton.jit
def _mxfp4_paged_mqa_logits_kernel(
    q_ptr,
    q_scale_ptr,
    cache_ptr,
    weight_ptr,
    len_ptr,
    table_ptr,
    out_ptr,
    num_blocks,
    num_heads,
    width,
    table_width,
    block_stride,
    q_stride_request,
    q_stride_token,
    q_stride_head,
    q_scale_stride_request,
    q_scale_stride_token,
    weight_stride,
    len_stride,
    table_stride,
    out_stride,
    NEXT_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_LENS: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    SCALES: tl.constexpr = DIM // BLOCK
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * KEYS
    key = tile + tl.arange(0, KEYS)
    longest = 0
    for j in range(0, NEXT_N):
        longest = tl.maximum(
            longest, tl.load(len_ptr + request * len_stride + (j if ROW_LENS else 0))
        )
    out = out_ptr + request * NEXT_N * out_stride + key
    if tile < longest:
        wanted = (key < longest) & (key // BLOCK_SIZE < table_width)
        block = tl.load(
            table_ptr + request * table_stride + key // BLOCK_SIZE,
            mask=wanted,
            other=-1,
        ).to(tl.int64)
        present = wanted & (block >= 0) & (block < num_blocks)
        page = block * block_stride
        token = key % BLOCK_SIZE
        dim = tl.arange(0, DIM)
        loaded = present[None, :] & (dim[:, None] < DIM)
        pairs = tl.load(
            cache_ptr + (page + token * HALF)[None, :] + dim[:, None] // 2,
            mask=loaded,
            other=0,
        ).to(tl.int32)
        scales = page + BLOCK_SIZE * HALF + token * SCALES
        exponent = tl.load(
            cache_ptr + scales[None, :] + dim[:, None] // BLOCK, mask=loaded, other=0
        ).to(tl.int32)
        keys = mxfp4_to_bf16((pairs >> (4 * (dim[:, None] % 2))) & 15, exponent)
        for j in range(0, NEXT_N):
            if ROW_LENS:
                length = tl.load(len_ptr + request * len_stride + j)
            else:
                length = tl.load(len_ptr + request * len_stride) - (NEXT_N - 1 - j)
            score = _score(
                keys,
                q_ptr + request * q_stride_request + j * q_stride_token,
                q_scale_ptr
                + request * q_scale_stride_request
                + j * q_scale_stride_token,
                weight_ptr + (request * NEXT_N + j) * weight_stride,
                tile < length,
                num_heads,
                q_stride_head,
                HEADS,
                DIM,
                BLOCK,
            )
            inside = present & (key < length)
            value = tl.where(inside, score, -float("inf"))
            tl.store(out + j * out_stride, value, mask=key < width)
    else:
        for j in range(0, NEXT_N):
            tl.store(out + j * out_stride, -float("inf"), mask=key < width)


def _check_queries(
    q: torch.Tensor, q_scales: torch.Tensor, weights: torch.Tensor
) -> None:
    """Raise unless `q` is packed `[..., H, D / 2]` with a word of scales a head."""
    check_dtype("q", q, torch.uint8, torch.int8)
    half = q.shape[-1]
    if 2 * half != MXFP4_BLOCK * SCALES_A_WORD:
        fail("q.shape[-1]", half, f"{MXFP4_BLOCK * SCALES_A_WORD // 2} packed bytes")
    check_heads(q, "q", weights)
    check_dtype("q_scales", q_scales, torch.int32)
    check_shape("q_scales", q_scales, *q.shape[:-1])
    check_inner_contiguous("q_scales", q_scales)


def mxfp4_mqa_logits(
    q: torch.Tensor,
    q_scales: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indexer scores of prefill rows over gathered MXFP4 keys. One launch.

    score[m, n] = sum_h weights[m, h] * relu(q[m, h] . kv[n]) for cu_seqlen_ks[m] <= n <
    cu_seqlen_ke[m], -inf elsewhere. D is 128: four blocks of 32 values, whose UE8M0
    bytes make one int32, the first block's in its low byte.

    Args:
        q: queries of shape `[M, H, D / 2]`, uint8 or int8: two e2m1 codes a byte, the
            even value in the low nibble.
        q_scales: of shape `[M, H]`, int32.
        kv: keys of shape `[N, D / 2]`, as `q`; rows may be strided.
        kv_scales: of shape `[N]`, int32.
        weights: of shape `[M, H]`, fp32.
        cu_seqlen_ks: first key of each row, of shape `[M]`, int32.
        cu_seqlen_ke: end of each row's keys, of shape `[M]`, int32.
        out: a tensor of shape `[M, N]`, fp32, to fill instead of a new one.

    Returns:
        Scores of shape `[M, N]`, fp32.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_shape("q", q, None, None, None)
    _check_queries(q, q_scales, weights)
    rows, heads, half = q.shape
    check_dtype("kv", kv, torch.uint8, torch.int8)
    check_shape("kv", kv, None, half)
    check_inner_contiguous("kv", kv)
    num_keys = kv.shape[0]
    check_dtype("kv_scales", kv_scales, torch.int32)
    check_shape("kv_scales", kv_scales, num_keys)
    check_inner_contiguous("kv_scales", kv_scales)
    bounds = check_bounds(cu_seqlen_ks, cu_seqlen_ke, rows, num_keys)
    check_same_device(
        q=q, q_scales=q_scales, kv=kv, kv_scales=kv_scales, weights=weights, **bounds
    )
    logits = output(out, rows, num_keys, q.device)
    if rows and num_keys:
        tile, keys = 8, 64
        _mxfp4_mqa_logits_kernel[
            (triton.cdiv(rows, tile), triton.cdiv(num_keys, keys))
        ](
            q.view(torch.uint8),
            q_scales,
            kv.view(torch.uint8),
            kv_scales,
            weights,
            cu_seqlen_ks,
            cu_seqlen_ke,
            logits,
            rows,
            num_keys,
            heads,
            q.stride(0),
            q.stride(1),
            q_scales.stride(0),
            kv.stride(0),
            weights.stride(0),
            logits.stride(0),
            ROWS=tile,
            KEYS=keys,
            HEADS=max(16, triton.next_power_of_2(heads)),
            DIM=2 * half,
            BLOCK=MXFP4_BLOCK,
            **launch_options(q.device, num_warps=8, grf=256),
        )
    return logits


def mxfp4_paged_mqa_logits(
    q: torch.Tensor,
    q_scales: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indexer scores of decode tokens over paged MXFP4 keys. One launch.

    A page holds D / 2 bytes a key, then D / 32 UE8M0 bytes a key; codes and scales as
    for `mxfp4_mqa_logits`, D = 128. Row b * next_n + j scores the first L keys of
    request b and is -inf behind them; L is context_lens[b, j] or, given one length a
    request, that of the last token less next_n - 1 - j.

    Args:
        q: queries of shape `[B, next_n, H, D / 2]`, uint8 or int8.
        q_scales: of shape `[B, next_n, H]`, int32.
        kv_cache: pages of shape `[num_blocks, block_size, 1, D / 2 + D / 32]` or
            without the 1, uint8. The block stride may be padded.
        weights: of shape `[B * next_n, H]`, fp32.
        context_lens: of shape `[B]`, `[B, 1]` or `[B, next_n]`, int32.
        block_tables: page of each block of a request, of shape `[B, W]`, int32. Keys in
            a page outside the cache score -inf.
        schedule_metadata: ignored; no plan is needed.
        max_model_len: width of the result.
        out: a tensor of the result's shape, fp32, to fill instead of a new one.

    Returns:
        Scores of shape `[B * next_n, max_model_len]`, fp32.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_shape("q", q, None, None, None, None)
    _check_queries(q, q_scales, weights)
    requests, next_n, heads, half = q.shape
    width = half + 2 * half // MXFP4_BLOCK
    cache = key_pages("kv_cache", kv_cache, width, 1)
    per_row = check_context(context_lens, block_tables, requests, next_n, max_model_len)
    check_same_device(
        q=q,
        q_scales=q_scales,
        kv_cache=cache,
        weights=weights,
        context_lens=context_lens,
        block_tables=block_tables,
    )
    logits = output(out, requests * next_n, max_model_len, q.device)
    if requests and next_n and max_model_len:
        keys = 64
        _mxfp4_paged_mqa_logits_kernel[(requests, triton.cdiv(max_model_len, keys))](
            q.view(torch.uint8),
            q_scales,
            cache,
            weights,
            context_lens,
            block_tables,
            logits,
            cache.shape[0],
            heads,
            max_model_len,
            block_tables.shape[1],
            cache.stride(0),
            q.stride(0),
            q.stride(1),
            q.stride(2),
            q_scales.stride(0),
            q_scales.stride(1),
            weights.stride(0),
            context_lens.stride(0),
            block_tables.stride(0),
            logits.stride(0),
            NEXT_N=next_n,
            BLOCK_SIZE=cache.shape[1],
            KEYS=keys,
            HEADS=max(16, triton.next_power_of_2(heads)),
            DIM=2 * half,
            BLOCK=MXFP4_BLOCK,
            ROW_LENS=per_row,
            **launch_options(q.device, num_warps=8, grf=256),
        )
    return logits
