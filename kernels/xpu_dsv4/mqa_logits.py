# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Indexer scores: score(q, k) = sum_h weight_h * relu(q_h . k), over FP8 operands.

The queries' scale is in the weights, each key has one of its own.
"""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from ._logits import (
    check_bounds,
    check_context,
    check_heads,
    key_pages,
    output,
    score_pages,
    score_rows,
)


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
    rows, _, dim = q.shape
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
    score_rows(q, None, kv, kv_scales, weights, cu_seqlen_ks, cu_seqlen_ke, logits)
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
    requests, next_n, _, dim = q_fp8.shape
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
    score_pages(
        q_fp8, None, cache, weights, context_lens, block_tables, per_row, logits
    )
    return logits
