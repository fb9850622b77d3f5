# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Indexer scores over FP8 operands: score(q, k) = sum_h weight_h * relu(q_h . k).

The scale of each query is in its weights; each key has one of its own. Source of the
formula: DeepSeek-V3.2, arXiv:2512.02556, equation 1.
"""

import torch

from ._logits import mqa_logits, paged_mqa_logits


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
    cu_seqlen_ks[m] <= n < cu_seqlen_ke[m]. Elements elsewhere are not written.

    Args:
        q (torch.Tensor):
            Queries of shape `[M, H, D]`, float8_e4m3fn, 1 to 128 heads. D is a power of
            two of at least 32.
        kv (torch.Tensor):
            Keys of shape `[N, D]`, float8_e4m3fn; rows may be strided.
        kv_scales (torch.Tensor):
            Scale of each key, of shape `[N]`, fp32.
        weights (torch.Tensor):
            Weight of each head times its query's scale, of shape `[M, H]`, fp32.
        cu_seqlen_ks (torch.Tensor):
            First key of each row, of shape `[M]`, int32.
        cu_seqlen_ke (torch.Tensor):
            End of each row's keys, of shape `[M]`, int32.
        out (torch.Tensor | None):
            Where to write the scores, of shape `[M, N]`, fp32. None allocates.

    Returns:
        Scores of shape `[M, N]`, fp32.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    return mqa_logits(q, None, kv, kv_scales, weights, cu_seqlen_ks, cu_seqlen_ke, out)


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
    b * next_n + j scores the first L keys of request b. Of the elements behind them, up
    to 127 and those that a longer row of the request has are -inf; the others are not
    written. L is context_lens[b, j]; if each request has one length, that of its last
    token, L is smaller by next_n - 1 - j.

    Args:
        q_fp8 (torch.Tensor):
            Queries of shape `[B, next_n, H, D]`, float8_e4m3fn, 1 to 128 heads. D is a
            power of two of at least 32.
        kv_cache_fp8 (torch.Tensor):
            Pages of shape `[num_blocks, block_size, (1,) D + 4]`, uint8. The block
            stride may be padded.
        weights (torch.Tensor):
            Weight of each head times its query's scale, of shape `[B * next_n, H]`,
            fp32.
        context_lens (torch.Tensor):
            Keys of each token or request, of shape `[B, next_n]`, `[B]` or `[B, 1]`,
            int32.
        block_tables (torch.Tensor):
            Pages of each request, of shape `[B, W]`, int32. Keys in a page outside the
            cache score -inf.
        schedule_metadata (torch.Tensor | None):
            Ignored: no plan is needed.
        max_model_len (int):
            Width of the result.
        out (torch.Tensor | None):
            Where to write the scores. None allocates.

    Returns:
        Scores of shape `[B * next_n, max_model_len]`, fp32.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    return paged_mqa_logits(
        ("q_fp8", "kv_cache_fp8"),
        q_fp8,
        None,
        kv_cache_fp8,
        weights,
        context_lens,
        block_tables,
        max_model_len,
        out,
    )
