# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of sparse MLA decode over FP8 pages."""

import torch

from ..pages import decode_tokens


def _valid_slots(indices: torch.Tensor, length: int, num_slots: int) -> torch.Tensor:
    """The first `length` slots that are inside the cache."""
    row = indices.reshape(-1)[: max(length, 0)].long()
    return row[(row >= 0) & (row < num_slots)]


def xpu_sparse_decode_fp8(
    q: torch.Tensor,
    kv_cache: torch.Tensor | None,
    swa_kv_cache: torch.Tensor,
    swa_only: bool,
    topk_indices: torch.Tensor | None,
    topk_lens: torch.Tensor | None,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    head_dim: int,
    nope_head_dim: int,
    rope_head_dim: int,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    magnitude: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """See `kernels.xpu_dsv4.mla.sparse_decode.xpu_sparse_decode_fp8`.

    out[t, h] = sum_k exp(s_k) v_k / (sum_k exp(s_k) + exp(sink_h)) with s_k = scale
    q.k, and 0 for a token without valid keys. `out` may be float64; `workspace` is not
    used. `magnitude`, of `out`'s shape, gets the same sum with |v_k|, which bounds the
    errors of rounding; `lse`, `[num_tokens, num_heads]`, gets log(sum_k exp(s_k)).
    """
    for token in range(q.shape[0]):
        parts = [(swa_kv_cache, swa_indices, swa_lens)]
        if not swa_only:
            assert kv_cache is not None
            assert topk_indices is not None and topk_lens is not None
            parts.insert(0, (kv_cache, topk_indices, topk_lens))
        k = torch.cat(
            [
                decode_tokens(
                    cache,
                    _valid_slots(
                        indices[token],
                        int(lens.reshape(-1)[token]),
                        cache.shape[0] * cache.shape[1],
                    ),
                )
                for cache, indices, lens in parts
            ]
        )
        score = q[token].to(torch.float64) @ k.T * softmax_scale
        weight = weights(score, attn_sink)
        out[token] = (weight @ k).to(out.dtype)
        if magnitude is not None:
            magnitude[token] = weight @ k.abs()
        if lse is not None:
            lse[token] = score.logsumexp(1)


def weights(score: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    """softmax([score, sink])[:, :-1] for float64 scores `[heads, keys]`."""
    heads, keys = score.shape
    if not keys:
        return score
    largest = score.max(dim=1, keepdim=True).values
    sink = torch.full((heads, 1), -torch.inf, dtype=torch.float64)
    if attn_sink is not None:
        sink = attn_sink[:heads].to(torch.float64).reshape(-1, 1)
    weight = torch.exp(score - largest)
    return weight / (weight.sum(1, keepdim=True) + torch.exp(sink - largest))


def attend(
    score: torch.Tensor, v: torch.Tensor, attn_sink: torch.Tensor | None
) -> torch.Tensor:
    """softmax([score, sink])[:, :-1] @ v for float64 scores `[heads, keys]`."""
    return weights(score, attn_sink) @ v
