# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the indexer's scores over MXFP4 operands."""

import torch

from ._quant import E2M1_VALUES

BLOCK = 32


def mxfp4_values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float64 values `[..., D]` of packed bytes, `[..., D / 2]` with the even value in
    the low nibble, and UE8M0 bytes, `[..., D / 32]`."""
    codes = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=packed.device)
    values = torch.cat((grid, -grid))[nibbles].unflatten(-1, (-1, BLOCK))
    return (values * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(-2)


def _scale_bytes(words: torch.Tensor) -> torch.Tensor:
    """`[..., 4]` bytes of `[...]` int32."""
    return words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[M, H, D]`, `[N, D]` and `[M, H]` to `[M, N]`."""
    products = torch.einsum("mhd,kd->mhk", q, keys).relu()
    return torch.einsum("mhk,mh->mk", products, weights.double())


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
    """See `kernels.xpu_dsv4.mqa_logits_mxfp4`; float64 result."""
    keys = mxfp4_values(kv, _scale_bytes(kv_scales))
    scores = _scores(mxfp4_values(q, _scale_bytes(q_scales)), keys, weights)
    key = torch.arange(kv.shape[0], device=q.device)
    inside = (key >= cu_seqlen_ks[:, None]) & (key < cu_seqlen_ke[:, None])
    scores = scores.where(inside, -torch.inf)
    return scores if out is None else out.copy_(scores)


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
    """See `kernels.xpu_dsv4.mqa_logits_mxfp4`; float64 result."""
    requests, next_n, _, half = q.shape
    blocks, block_size = kv_cache.shape[:2]
    pages = kv_cache.reshape(blocks, -1)
    codes = pages[:, : block_size * half].reshape(-1, half)
    scales = pages[:, block_size * half :].reshape(-1, 2 * half // BLOCK)
    keys = mxfp4_values(codes, scales)
    queries = mxfp4_values(q, _scale_bytes(q_scales))
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
        values = _scores(queries[b], keys[slot], weights[rows])
        inside = known & (position < lens[b, :, None])
        scores[rows, :reach] = values.where(inside, -torch.inf)
    return scores if out is None else out.copy_(scores)
