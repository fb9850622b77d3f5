# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the indexer's scores."""

import torch


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[M, H, D]`, `[N, D]` and `[M, H]` to `[M, N]`."""
    products = torch.einsum("mhd,kd->mhk", q, keys).relu()
    return torch.einsum("mhk,mh->mk", products, weights)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.mqa_logits.fp8_mqa_logits`; float64 result."""
    scores = _scores(q.double(), kv.double(), weights.double()) * kv_scales.double()
    key = torch.arange(kv.shape[0], device=q.device)
    inside = (key >= cu_seqlen_ks[:, None]) & (key < cu_seqlen_ke[:, None])
    scores = scores.where(inside, -torch.inf)
    return scores if out is None else out.copy_(scores)


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
    """See `kernels.xpu_dsv4.mqa_logits.fp8_paged_mqa_logits`; float64 result."""
    requests, next_n, _, dim = q_fp8.shape
    blocks, block_size = kv_cache_fp8.shape[:2]
    pages = kv_cache_fp8.reshape(blocks, -1)
    split = block_size * dim
    values = pages[:, :split].contiguous().view(torch.float8_e4m3fn).double()
    scales = pages[:, split : split + 4 * block_size].contiguous().view(torch.float32)
    keys = values.view(-1, dim) * scales.double().view(-1, 1)
    lens = context_lens.reshape(requests, -1)
    if lens.shape[1] != next_n:
        lens = lens - torch.arange(next_n - 1, -1, -1, device=lens.device)
    scores = torch.full(
        (requests * next_n, max_model_len),
        -torch.inf,
        dtype=torch.float64,
        device=q_fp8.device,
    )
    for b in range(requests):
        reach = min(block_tables.shape[1] * block_size, max_model_len)
        position = torch.arange(reach, device=q_fp8.device)
        block = block_tables[b, position // block_size].long()
        known = (block >= 0) & (block < blocks)
        slot = block.where(known, 0) * block_size + position % block_size
        rows = slice(b * next_n, (b + 1) * next_n)
        values = _scores(q_fp8[b].double(), keys[slot], weights[rows].double())
        inside = known & (position < lens[b, :, None])
        scores[rows, :reach] = values.where(inside, -torch.inf)
    return scores if out is None else out.copy_(scores)
