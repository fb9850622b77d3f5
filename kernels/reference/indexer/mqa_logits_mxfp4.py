# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the indexer's scores over MXFP4 operands."""

import torch

from .._quant import E2M1_VALUES
from .mqa_logits import page_scores, row_scores

BLOCK = 32


def mxfp4_values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values of MXFP4 vectors.

    Args:
        packed (torch.Tensor):
            e2m1 codes of shape `[..., D / 2]`, two per byte, the even value in the low
            nibble.
        scales (torch.Tensor):
            UE8M0 bytes of shape `[..., D / 32]`.

    Returns:
        Values of shape `[..., D]`, float64.
    """
    codes = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=packed.device)
    values = torch.cat((grid, -grid))[nibbles].unflatten(-1, (-1, BLOCK))
    return (values * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(-2)


def _scale_bytes(words: torch.Tensor) -> torch.Tensor:
    """Bytes of int32 words: `[...]` to `[..., 4]`."""
    return words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))


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
    """See `kernels.xpu_dsv4.indexer.mqa_logits_mxfp4`; float64 result."""
    queries = mxfp4_values(q, _scale_bytes(q_scales))
    keys = mxfp4_values(kv, _scale_bytes(kv_scales))
    return row_scores(queries, keys, weights, cu_seqlen_ks, cu_seqlen_ke, out)


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
    """See `kernels.xpu_dsv4.indexer.mqa_logits_mxfp4`; float64 result."""
    half = q.shape[-1]
    blocks, block_size = kv_cache.shape[:2]
    pages = kv_cache.reshape(blocks, -1)
    codes = pages[:, : block_size * half].reshape(-1, half)
    scales = pages[:, block_size * half :].reshape(-1, 2 * half // BLOCK)
    return page_scores(
        mxfp4_values(q, _scale_bytes(q_scales)),
        mxfp4_values(codes, scales),
        block_size,
        weights,
        context_lens,
        block_tables,
        max_model_len,
        out,
    )
