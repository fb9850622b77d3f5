# SPDX-License-Identifier: Apache-2.0
"""Routed experts of vllm-xpu-kernels in Python, around the ops."""

from typing import Any

import torch

from standins.emulated_xpu.wheel.formats import expanded
from standins.emulated_xpu.wheel.pins import kernels_version

ACTIVATIONS = {
    "silu": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "swigluoai": "swigluoai_and_mul",
}


class XpuFusedMoe:
    """Permutation, grouped GEMM, activation, grouped GEMM, sum over a token's experts.

    `act_func(out, gate_up)` is an attribute that callers may replace, as in those
    versions. `expert_map` holds the local number of each expert, or -1; a rank without
    one assumes that every rank has as many experts as itself. From 0.1.10 on
    `gemm1_clamp_limit` clamps the gate from above, and the other half on both sides.
    From 0.1.11 on the dtype of the weights tells their format.

    Emulated without bias: MXFP4; INT4, whose codes have their zero at 8; FP8 with a
    scale for each block of 128 x 128. The grouped GEMM of these versions refuses such
    scales. From 0.1.11 on FP8 experts with them go through the package's own reference
    instead, which knows neither the limit nor a replaced activation.
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
        expert_map: torch.Tensor | None = None,
        is_int4: bool = False,
        is_mxfp4: bool = False,
        is_block_fp8: bool = False,
        gemm1_clamp_limit: float | None = None,
        **others: Any,
    ) -> None:
        version = tuple(map(int, kernels_version().split(".")))
        if gemm1_clamp_limit is not None and version < (0, 1, 10):
            raise TypeError(f"XpuFusedMoe of {kernels_version()} takes no limit")
        self.format_from_dtype = version >= (0, 1, 11)
        if self.format_from_dtype:
            is_mxfp4 = w13.dtype == torch.float4_e2m1fn_x2
            is_int4 = w13.dtype == torch.uint8
            # With scales of another dtype they are MXFP8, which is not emulated.
            is_block_fp8 = w13.dtype == torch.float8_e4m3fn and (
                w13_scales.ndim == 3 and w13_scales.dtype == torch.float32
            )
        used = [name for name, value in others.items() if value not in (None, False)]
        if used or is_mxfp4 + is_int4 + is_block_fp8 != 1:
            raise NotImplementedError(
                "XpuFusedMoe on the emulated XPU: MXFP4, INT4 and FP8 with block scales"
                f" only, got {w13.dtype} {used}"
            )
        if expert_map is None and ep_size > 1:
            expert_map = torch.empty(num_experts * ep_size, dtype=torch.int32)
            torch.ops._moe_C.init_expert_map(expert_map, num_experts, ep_rank, ep_size)
        self.expert_map = expert_map
        self.weights = (w13, w2)
        if is_int4:
            self.weights = (self._signed(w13), self._signed(w2))
        self.is_int4, self.is_mxfp4 = is_int4, is_mxfp4
        self.by_reference = is_block_fp8 and self.format_from_dtype
        # 4-bit weights are [E, N, K / 2], FP8 ones [E, K, N].
        self.column_dim = 2 if is_block_fp8 else 1
        self.scales = (w13_scales, w2_scales)
        self.biases = (w13_bias, w2_bias)
        self.limit = gemm1_clamp_limit
        self.topk = n_experts_per_token
        self.num_experts = num_experts
        self.activation = getattr(torch.ops._C, ACTIVATIONS[activation])
        self.act_func = self.activation

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        a1q_scale: torch.Tensor | None = None,
    ) -> None:
        """Write the weighted sum of the experts' rows into `output`, `[T, H]`.

        `expert_map` replaces the one of the constructor. `a1q_scale` holds the scales
        of quantized activations, which are not emulated. Versions have both arguments
        from 0.1.12.1 on at the latest.
        """
        tokens, hidden = hidden_states.shape
        if expert_map is None:
            expert_map = self.expert_map
        sorted_rows = hidden_states.new_empty(tokens * self.topk, hidden)
        rows_per_expert = torch.zeros(self.num_experts, dtype=torch.int32)
        position = torch.empty(tokens, self.topk, dtype=torch.int32)
        torch.ops._moe_C.remap_hidden_states(
            hidden_states,
            a1q_scale,
            sorted_rows,
            None,
            expert_map,
            rows_per_expert,
            position,
            topk_ids,
            self.num_experts if expert_map is None else len(expert_map),
            self.num_experts,
        )
        gate_up = self._grouped_gemm(0, sorted_rows, rows_per_expert)
        limit = None if self.by_reference else self.limit
        if limit is not None and limit > 0:
            gate, up = gate_up.chunk(2, dim=1)
            gate.clamp_(max=limit)
            up.clamp_(-limit, limit)
        activated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        activate = self.activation if self.by_reference else self.act_func
        activate(activated, gate_up)
        rows = self._grouped_gemm(1, activated, rows_per_expert)
        torch.ops._moe_C.moe_gather(
            output, rows, topk_weights, position, self.num_experts
        )

    def _grouped_gemm(
        self, product: int, rows: torch.Tensor, rows_per_expert: torch.Tensor
    ) -> torch.Tensor:
        weight, scales = self.weights[product], self.scales[product]
        if self.by_reference:
            return block_fp8_product(rows, weight, scales, rows_per_expert)
        columns = weight.shape[self.column_dim]
        out = rows.new_empty(len(rows), columns)
        operands: tuple[Any, ...] = (rows, weight, scales)
        flags: tuple[bool, ...] = (self.is_int4, self.is_mxfp4)
        if self.format_from_dtype:
            operands, flags = (rows, None, weight, scales), ()
        torch.ops._xpu_C.cutlass_grouped_gemm_interface(
            *operands,
            self.biases[product],
            out,
            rows_per_expert,
            columns,
            rows.shape[1],
            self.num_experts,
            *flags,
        )
        return out

    def _signed(self, codes: torch.Tensor) -> torch.Tensor:
        """Two's complement of packed INT4 codes whose zero is 8."""
        signed = codes ^ 0x88
        return signed.view(torch.int8) if self.format_from_dtype else signed


def block_fp8_product(
    rows: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    rows_per_expert: torch.Tensor,
) -> torch.Tensor:
    """The reference of 0.1.11 and 0.1.12 for FP8 experts with block scales.

    Each 128 values of a row are rounded to e4m3 with an fp32 scale of their own. Both
    operands are rounded to the rows' dtype before the product. Rows behind those of
    the experts give zero.

    Args:
        rows: `[R, K]` in bf16 or fp16, sorted by expert.
        weights: `[E, K, N]` in e4m3.
        scales: `[E, K / 128, N / 128]` in fp32.
        rows_per_expert: `[E]`.
    """
    codes = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    row_scales = torch.empty(len(rows), rows.shape[1] // 128)
    torch.ops._C.per_token_group_fp8_quant(
        rows, codes, row_scales, 128, 1e-10, -448.0, 448.0, False, False, False
    )
    values = (codes.float() * expanded(row_scales, rows.shape)).to(rows.dtype)
    out = rows.new_zeros(len(rows), weights.shape[2])
    start = 0
    for expert, count in enumerate(rows_per_expert.tolist()):
        blocks = expanded(scales[expert], weights[expert].shape)
        weight = (weights[expert].float() * blocks).to(rows.dtype)
        out[start : start + count] = values[start : start + count] @ weight
        start += count
    return out
