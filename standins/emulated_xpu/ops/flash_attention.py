# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over sequences of different lengths, as a vision tower calls it."""

from itertools import pairwise
from typing import Any

import torch

from standins.emulated_xpu.wheel.implementations import implements

NAMES = (
    *("seqused_k", "leftpad_k", "block_table", "alibi_slopes"),
    *("max_seqlen_q", "max_seqlen_k", "p_dropout", "q_scale", "k_scale", "v_scale"),
    *("softmax_scale", "softmax_sink", "zero_tensors", "is_causal"),
    *("window_size_left", "window_size_right", "softcap", "return_softmax"),
)
"""The arguments after the tensors, up to those that only choose how to compute."""
NEEDED = {"max_seqlen_q", "max_seqlen_k", "softmax_scale", "zero_tensors"}
PLAIN = {
    "is_causal": False,
    "p_dropout": 0.0,
    "softcap": 0.0,
    "return_softmax": False,
    "window_size_left": -1,
    "window_size_right": -1,
}
"""What the others must be, None if not named here."""


@implements("_vllm_fa2_C::varlen_fwd")
def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    """Each token attends to all tokens of its sequence.

    Sums are float32, and the weights are rounded to the dtype of `v` before the second
    product. Only what a tower needs is computed.
    """
    given = dict(zip(NAMES, rest, strict=False))
    for name in given.keys() - NEEDED:
        if given[name] != PLAIN.get(name):
            raise NotImplementedError(f"varlen_fwd with {name}={given[name]!r}")
    result = torch.empty_like(q) if out is None else out
    starts, others = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (first, last), keys in zip(pairwise(starts), pairwise(others), strict=True):
        scores = torch.einsum(
            "qhd,khd->hqk", q[first:last].float(), k[slice(*keys)].float()
        )
        weights = (scores * given["softmax_scale"]).softmax(-1).to(v.dtype).float()
        attended = torch.einsum("hqk,khd->qhd", weights, v[slice(*keys)].float())
        result[first:last] = attended.to(result.dtype)
    return [result, q.new_empty(0, dtype=torch.float32)]
