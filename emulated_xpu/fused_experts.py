# SPDX-License-Identifier: Apache-2.0
"""The Python class around the grouped GEMM of vllm-xpu-kernels 0.1.8 and 0.1.9."""

from typing import Any

import torch

ACTIVATIONS = {
    "silu": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "swigluoai": "swigluoai_and_mul",
}


class XpuFusedMoe:
    """Permutation, grouped GEMM, activation, grouped GEMM, sum over a token's experts.

    `act_func(out, gate_up)` is an attribute that its owner may replace, as in those
    versions. Only MXFP4 weights without bias on one rank are emulated.
    """

    def __init__(
        self,
        w13: torch.Tensor,
        w13_scales: torch.Tensor,
        w13_bias: torch.Tensor | None,
        w2: torch.Tensor,
        w2_scales: torch.Tensor,
        w2_bias: torch.Tensor | None,
        n_experts_per_token: int,
        activation: str,
        num_experts: int,
        ep_rank: int = 0,
        ep_size: int = 1,
        is_mxfp4: bool = False,
        **others: Any,
    ) -> None:
        asked = [name for name, value in others.items() if value not in (None, False)]
        if asked or not is_mxfp4 or ep_size > 1:
            raise NotImplementedError(
                f"XpuFusedMoe on the emulated XPU: MXFP4 on one rank only, got {asked}"
            )
        self.weights = (w13, w2)
        self.scales = (w13_scales, w2_scales)
        self.biases = (w13_bias, w2_bias)
        self.topk = n_experts_per_token
        self.num_experts = num_experts
        self.act_func = getattr(torch.ops._C, ACTIVATIONS[activation])

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> None:
        """Write the weighted sum of the experts' rows into `output`, `[T, H]`."""
        tokens, hidden = hidden_states.shape
        sorted_rows = hidden_states.new_empty(tokens * self.topk, hidden)
        rows_per_expert = torch.zeros(self.num_experts, dtype=torch.int32)
        position = torch.empty(tokens, self.topk, dtype=torch.int32)
        torch.ops._moe_C.remap_hidden_states(
            hidden_states,
            None,
            sorted_rows,
            None,
            None,
            rows_per_expert,
            position,
            topk_ids,
            self.num_experts,
            self.num_experts,
        )
        gate_up = self._grouped_gemm(0, sorted_rows, rows_per_expert)
        activated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self.act_func(activated, gate_up)
        rows = self._grouped_gemm(1, activated, rows_per_expert)
        torch.ops._moe_C.moe_gather(
            output, rows, topk_weights, position, self.num_experts
        )

    def _grouped_gemm(
        self, which: int, rows: torch.Tensor, rows_per_expert: torch.Tensor
    ) -> torch.Tensor:
        weight = self.weights[which]
        out = rows.new_empty(len(rows), weight.shape[1])
        torch.ops._xpu_C.cutlass_grouped_gemm_interface(
            rows,
            weight,
            self.scales[which],
            self.biases[which],
            out,
            rows_per_expert,
            weight.shape[1],
            rows.shape[1],
            self.num_experts,
            False,
            True,
        )
        return out
