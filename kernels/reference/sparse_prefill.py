# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of sparse MLA prefill over gathered bf16 keys."""

import torch

from .sparse_decode import attend


def triton_bf16_mla_sparse_interface(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    block_dpe: int = 64,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.sparse_prefill.triton_bf16_mla_sparse_interface`.

    Returns float64 out, max_logits and lse.
    """
    num_tokens, num_heads, _ = q.shape
    result = torch.zeros(num_tokens, num_heads, d_v, dtype=torch.float64)
    max_logits = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), torch.inf, dtype=torch.float64)
    rows = indices.reshape(num_tokens, -1)
    for token in range(num_tokens):
        length = rows.shape[1] if topk_length is None else int(topk_length[token])
        chosen = [
            row
            for row in rows[token].tolist()[: max(length, 0)]
            if 0 <= row < kv.shape[0]
        ]
        if not chosen:
            continue
        k = kv[chosen, 0].to(torch.float64)
        score = q[token].to(torch.float64) @ k.T * sm_scale
        result[token] = attend(score, k[:, :d_v], attn_sink)
        max_logits[token] = score.max(dim=1).values
        lse[token] = torch.logsumexp(score, dim=1)
    if out is not None:
        out.copy_(result)
    return result, max_logits, lse
