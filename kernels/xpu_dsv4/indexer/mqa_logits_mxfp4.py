# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Indexer scores over MXFP4 operands: score(q, k) = sum_h weight_h * relu(q_h . k).

A vector of 128 values is 64 bytes, each of two e2m1 codes with the even value in the
low nibble. Each block of 32 values has a UE8M0 exponent as its scale; the four make one
int32 word, the first block's in the low byte. Source of the formula: DeepSeek-V3.2,
arXiv:2512.02556, equation 1.
"""

import torch

from ._logits import mqa_logits, paged_mqa_logits


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
    cu_seqlen_ke[m]. Elements elsewhere are not written.

    Args:
        q (torch.Tensor):
            Queries of shape `[M, H, 64]`, uint8 or int8, 1 to 128 heads.
        q_scales (torch.Tensor):
            Scales of each head, of shape `[M, H]`, int32.
        kv (torch.Tensor):
            Keys of shape `[N, 64]`, uint8 or int8; rows may be strided.
        kv_scales (torch.Tensor):
            Scales of each key, of shape `[N]`, int32.
        weights (torch.Tensor):
            Weight of each head, of shape `[M, H]`, fp32.
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
    return mqa_logits(
        q, q_scales, kv, kv_scales, weights, cu_seqlen_ks, cu_seqlen_ke, out
    )


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

    A page holds `block_size` keys of 64 bytes of codes, then their scales, 4 bytes per
    key. Row b * next_n + j scores the first L keys of request b. Of the elements behind
    them, up to 255 and those that a longer row of the request has are -inf; the others
    are not written. L is context_lens[b, j]; if each request has one length, that of
    its last token, L is smaller by next_n - 1 - j.

    Args:
        q (torch.Tensor):
            Queries of shape `[B, next_n, H, 64]`, uint8 or int8, 1 to 128 heads.
        q_scales (torch.Tensor):
            Scales of each head, of shape `[B, next_n, H]`, int32.
        kv_cache (torch.Tensor):
            Pages of shape `[num_blocks, block_size, (1,) 68]`, uint8. The block stride
            may be padded.
        weights (torch.Tensor):
            Weight of each head, of shape `[B * next_n, H]`, fp32.
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
        ("q", "kv_cache"),
        q,
        q_scales,
        kv_cache,
        weights,
        context_lens,
        block_tables,
        max_model_len,
        out,
    )
