# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Indexer scores: score(q, k) = sum_h weight_h * relu(q_h . k), over FP8 operands.

e4m3 values are exact in bf16: the products run on bf16 matrix units and accumulate in
fp32. A program scores one tile of keys against several queries.
"""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from ._fp8 import e4m3_shifted
from ._launch import launch_options
from ._logits import check_bounds, check_context, check_heads, key_pages, output
from ._triton import tl, triton


@triton.jit
def _e4m3_to_bf16(code):
    """bf16 value of uint8 e4m3fn codes."""
    return (e4m3_shifted(code) * 2.0**120).to(tl.bfloat16)


@triton.jit
def _score(
    keys,  # [DIM, KEYS] bf16
    q_ptr,
    weight_ptr,
    alive,
    num_heads,
    q_stride_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Weighted sum over heads of relu(query . keys), `[KEYS]`."""
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    real = (head < num_heads) & alive
    codes = tl.load(
        q_ptr + head[:, None] * q_stride_head + dim[None, :],
        mask=real[:, None] & (dim[None, :] < DIM),
        other=0,
    )  # [HEADS, DIM]
    weight = tl.load(weight_ptr + head, mask=real, other=0.0)
    products = tl.dot(_e4m3_to_bf16(codes), keys)  # [HEADS, KEYS]
    return tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)


@triton.jit
def _mqa_logits_kernel(
    q_ptr,
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
    kv_stride,
    weight_stride,
    out_stride,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    row = first + tl.arange(0, ROWS)
    starts = tl.load(start_ptr + row, mask=row < num_rows, other=num_keys)
    ends = tl.load(end_ptr + row, mask=row < num_rows, other=0)
    tile = tl.program_id(1) * KEYS
    needed = tl.max((starts < ends).to(tl.int32), axis=0) > 0
    needed = needed & (tl.min(starts, axis=0) < tile + KEYS)
    needed = needed & (tl.max(ends, axis=0) > tile)
    present = (key < num_keys) & needed
    dim = tl.arange(0, DIM)
    codes = tl.load(
        kv_ptr + key.to(tl.int64)[None, :] * kv_stride + dim[:, None],
        mask=present[None, :] & (dim[:, None] < DIM),
        other=0,
    )
    keys = _e4m3_to_bf16(codes)
    scale = tl.load(kv_scale_ptr + key, mask=present, other=0.0)
    for i in range(0, ROWS):
        r = (first + i).to(tl.int64)
        if r < num_rows:
            start = tl.load(start_ptr + r)
            end = tl.load(end_ptr + r)
            out = out_ptr + r * out_stride + key
            if (start < tile + KEYS) & (end > tile):
                score = _score(
                    keys,
                    q_ptr + r * q_stride_row,
                    weight_ptr + r * weight_stride,
                    r < num_rows,
                    num_heads,
                    q_stride_head,
                    HEADS,
                    DIM,
                )
                inside = present & (key >= start) & (key < end)
                value = tl.where(inside, score * scale, -float("inf"))
                tl.store(out, value, mask=key < num_keys)
            else:
                tl.store(out, -float("inf"), mask=key < num_keys)


@triton.jit
def _paged_mqa_logits_kernel(
    q_ptr,
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
    weight_stride,
    len_stride,
    table_stride,
    out_stride,
    NEXT_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROW_LENS: tl.constexpr,
):
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
        codes = tl.load(
            cache_ptr + (page + token * DIM)[None, :] + dim[:, None],
            mask=present[None, :] & (dim[:, None] < DIM),
            other=0,
        )
        keys = _e4m3_to_bf16(codes)
        scales = cache_ptr + page + BLOCK_SIZE * DIM + token * 4
        scale = tl.load(scales.to(tl.pointer_type(tl.float32)), mask=present, other=0.0)
        for j in range(0, NEXT_N):
            if ROW_LENS:
                length = tl.load(len_ptr + request * len_stride + j)
            else:
                length = tl.load(len_ptr + request * len_stride) - (NEXT_N - 1 - j)
            score = _score(
                keys,
                q_ptr + request * q_stride_request + j * q_stride_token,
                weight_ptr + (request * NEXT_N + j) * weight_stride,
                tile < length,
                num_heads,
                q_stride_head,
                HEADS,
                DIM,
            )
            inside = present & (key < length)
            value = tl.where(inside, score * scale, -float("inf"))
            tl.store(out + j * out_stride, value, mask=key < width)
    else:
        for j in range(0, NEXT_N):
            tl.store(out + j * out_stride, -float("inf"), mask=key < width)


def _check_queries(name: str, q: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise unless `q` is FP8 `[..., H, D]` and `weights` its fp32 `[rows, H]`."""
    check_dtype(name, q, torch.float8_e4m3fn)
    dim = q.shape[-1]
    if dim < 16 or dim & (dim - 1):
        fail(f"{name}.shape[-1]", dim, "a power of two of at least 16")
    check_heads(q, name, weights)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indexer scores of prefill rows over gathered keys. One launch.

    score[m, n] = kv_scales[n] * sum_h weights[m, h] * relu(q[m, h] . kv[n]) for
    cu_seqlen_ks[m] <= n < cu_seqlen_ke[m], -inf elsewhere.

    Args:
        q: queries of shape `[M, H, D]`, float8_e4m3fn; their scale is in the weights.
        kv: keys of shape `[N, D]`, float8_e4m3fn; rows may be strided.
        kv_scales: of shape `[N]`, fp32.
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
    _check_queries("q", q, weights)
    rows, heads, dim = q.shape
    check_dtype("kv", kv, torch.float8_e4m3fn)
    check_shape("kv", kv, None, dim)
    check_inner_contiguous("kv", kv)
    num_keys = kv.shape[0]
    check_dtype("kv_scales", kv_scales, torch.float32)
    check_shape("kv_scales", kv_scales, num_keys)
    check_inner_contiguous("kv_scales", kv_scales)
    bounds = check_bounds(cu_seqlen_ks, cu_seqlen_ke, rows, num_keys)
    check_same_device(q=q, kv=kv, kv_scales=kv_scales, weights=weights, **bounds)
    logits = output(out, rows, num_keys, q.device)
    if rows and num_keys:
        tile, keys = 8, 64
        _mqa_logits_kernel[(triton.cdiv(rows, tile), triton.cdiv(num_keys, keys))](
            q.view(torch.uint8),
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
            kv.stride(0),
            weights.stride(0),
            logits.stride(0),
            ROWS=tile,
            KEYS=keys,
            HEADS=max(16, triton.next_power_of_2(heads)),
            DIM=dim,
            **launch_options(q.device, num_warps=8, grf=256),
        )
    return logits


def fp8_paged_mqa_logits(
    q_fp8: torch.Tensor,
    kv_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indexer scores of decode tokens over paged keys. One launch.

    A page holds `block_size` keys of D e4m3 bytes, then their fp32 scales. Row
    b * next_n + j scores the first L keys of request b and is -inf behind them; L is
    context_lens[b, j] or, given one length a request, that of the last token less
    next_n - 1 - j.

    Args:
        q_fp8: queries of shape `[B, next_n, H, D]`, float8_e4m3fn; their scale is in
            the weights.
        kv_cache_fp8: pages of shape `[num_blocks, block_size, 1, D + 4]` or without the
            1, uint8. The block stride may be padded.
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
    check_shape("q_fp8", q_fp8, None, None, None, None)
    _check_queries("q_fp8", q_fp8, weights)
    requests, next_n, heads, dim = q_fp8.shape
    cache = key_pages("kv_cache_fp8", kv_cache_fp8, dim + 4, 4)
    per_row = check_context(context_lens, block_tables, requests, next_n, max_model_len)
    check_same_device(
        q_fp8=q_fp8,
        kv_cache_fp8=cache,
        weights=weights,
        context_lens=context_lens,
        block_tables=block_tables,
    )
    logits = output(out, requests * next_n, max_model_len, q_fp8.device)
    if requests and next_n and max_model_len:
        keys = 64
        _paged_mqa_logits_kernel[(requests, triton.cdiv(max_model_len, keys))](
            q_fp8.view(torch.uint8),
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
            q_fp8.stride(0),
            q_fp8.stride(1),
            q_fp8.stride(2),
            weights.stride(0),
            context_lens.stride(0),
            block_tables.stride(0),
            logits.stride(0),
            NEXT_N=next_n,
            BLOCK_SIZE=cache.shape[1],
            KEYS=keys,
            HEADS=max(16, triton.next_power_of_2(heads)),
            DIM=dim,
            ROW_LENS=per_row,
            **launch_options(q_fp8.device, num_warps=8, grf=256),
        )
    return logits
