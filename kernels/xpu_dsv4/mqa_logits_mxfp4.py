# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Indexer scores over MXFP4 operands: score(q, k) = sum_h weight_h * relu(q_h . k).

Each block of 32 values has a power of two as its scale; none remains afterwards.
"""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from ._fp4 import MXFP4_BLOCK, SCALES_A_WORD
from ._logits import (
    check_bounds,
    check_context,
    check_heads,
    key_pages,
    output,
    score_pages,
    score_rows,
)


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
    rows, _, half = q.shape
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
    score_rows(q, q_scales, kv, kv_scales, weights, cu_seqlen_ks, cu_seqlen_ke, logits)
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
    requests, next_n, _, half = q.shape
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
    score_pages(
        q, q_scales, cache, weights, context_lens, block_tables, per_row, logits
    )
    return logits
