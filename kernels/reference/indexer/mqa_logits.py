# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the indexer's scores."""

import torch


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_h weights[m, h] * relu(q[m, h] . keys[n]), `[M, N]` float64."""
    products = torch.einsum("mhd,kd->mhk", q, keys).relu()
    return torch.einsum("mhk,mh->mk", products, weights.double())


def row_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Scores `[M, N]` of float64 queries `[M, H, D]` for float64 keys `[N, D]`."""
    scores = _scores(q, keys, weights)
    key = torch.arange(keys.shape[0], device=q.device)
    inside = (key >= cu_seqlen_ks[:, None]) & (key < cu_seqlen_ke[:, None])
    scores = scores.where(inside, -torch.inf)
    return scores if out is None else out.copy_(scores)


def page_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    block_size: int,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Scores `[B * next_n, max_model_len]` of paged keys.

    Args:
        q (torch.Tensor):
            Queries of shape `[B, next_n, H, D]`, float64.
        keys (torch.Tensor):
            Keys of all slots, of shape `[num_blocks * block_size, D]`, float64.
        block_size (int):
            Keys per page.
        weights (torch.Tensor):
            As for `fp8_paged_mqa_logits`, as all that follow.
        context_lens (torch.Tensor):
            Keys of each token or request.
        block_tables (torch.Tensor):
            Pages of each request.
        max_model_len (int):
            Width of the result.
        out (torch.Tensor | None):
            Where to write the scores. None allocates.
    """
    requests, next_n = q.shape[:2]
    blocks = keys.shape[0] // block_size
    lens = context_lens.reshape(requests, -1)
    if lens.shape[1] != next_n:
        lens = lens - torch.arange(next_n - 1, -1, -1, device=lens.device)
    shape = (requests * next_n, max_model_len)
    scores = torch.full(shape, -torch.inf, dtype=torch.float64, device=q.device)
    reach = min(block_tables.shape[1] * block_size, max_model_len)
    position = torch.arange(reach, device=q.device)
    for b in range(requests):
        block = block_tables[b, position // block_size].long()
        known = (block >= 0) & (block < blocks)
        slot = block.where(known, 0) * block_size + position % block_size
        rows = slice(b * next_n, (b + 1) * next_n)
        values = _scores(q[b], keys[slot], weights[rows])
        inside = known & (position < lens[b, :, None])
        scores[rows, :reach] = values.where(inside, -torch.inf)
    return scores if out is None else out.copy_(scores)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.indexer.mqa_logits.fp8_mqa_logits`; float64 result."""
    keys = kv.double() * kv_scales.double()[:, None]
    return row_scores(q.double(), keys, weights, cu_seqlen_ks, cu_seqlen_ke, out)


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
    """See `xpu_dsv4.indexer.mqa_logits.fp8_paged_mqa_logits`; float64 result."""
    dim = q_fp8.shape[-1]
    blocks, block_size = kv_cache_fp8.shape[:2]
    pages = kv_cache_fp8.reshape(blocks, -1)
    split = block_size * dim
    values = pages[:, :split].contiguous().view(torch.float8_e4m3fn).double()
    scales = pages[:, split : split + 4 * block_size].contiguous().view(torch.float32)
    return page_scores(
        q_fp8.double(),
        values.view(-1, dim) * scales.double().view(-1, 1),
        block_size,
        weights,
        context_lens,
        block_tables,
        max_model_len,
        out,
    )
