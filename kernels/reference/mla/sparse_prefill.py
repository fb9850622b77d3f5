# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of sparse MLA prefill over gathered bf16 keys."""

import torch

from .sparse_decode import weights


def xpu_sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    magnitude: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.mla.sparse_prefill.xpu_sparse_prefill`; float64.

    `magnitude`, of `q`'s shape, gets the same sum with |v|.
    """
    num_tokens = q.shape[0]
    result = torch.zeros(q.shape, dtype=torch.float64)
    rows = indices.reshape(num_tokens, -1)
    for token in range(num_tokens):
        length = rows.shape[1] if topk_length is None else int(topk_length[token])
        chosen = rows[token, : max(length, 0)].long()
        chosen = chosen[(chosen >= 0) & (chosen < kv.shape[0])]
        k = kv[chosen, 0].to(torch.float64)
        score = q[token].to(torch.float64) @ k.T * sm_scale
        weight = weights(score, attn_sink)
        result[token] = weight @ k
        if magnitude is not None:
            magnitude[token] = weight @ k.abs()
    if out is not None:
        out.copy_(result)
    return result
