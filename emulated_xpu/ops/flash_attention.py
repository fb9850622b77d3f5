# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over sequences of different lengths, as a vision tower calls it."""

from typing import Any

import torch

from emulated_xpu.implementations import implements


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
    names = (
        "seqused_k leftpad_k block_table alibi_slopes max_seqlen_q max_seqlen_k "
        "p_dropout q_scale k_scale v_scale softmax_scale softmax_sink zero_tensors "
        "is_causal window_size_left window_size_right softcap return_softmax"
    ).split()
    given = dict(zip(names, rest, strict=False))
    plain = {
        "is_causal": False,
        "p_dropout": 0.0,
        "softcap": 0.0,
        "return_softmax": False,
        "window_size_left": -1,
        "window_size_right": -1,
    }
    needed = {"max_seqlen_q", "max_seqlen_k", "softmax_scale", "zero_tensors"}
    for name in given.keys() - needed:
        if given[name] != plain.get(name):
            raise NotImplementedError(f"varlen_fwd with {name}={given[name]!r}")
    result = torch.empty_like(q) if out is None else out
    starts, others = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for number, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        keys = slice(others[number], others[number + 1])
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k[keys].float())
        weights = (scores * given["softmax_scale"]).softmax(-1).to(v.dtype).float()
        attended = torch.einsum("hqk,khd->qhd", weights, v[keys].float())
        result[first:last] = attended.to(result.dtype)
    return [result, q.new_empty(0, dtype=torch.float32)]
