# SPDX-License-Identifier: Apache-2.0
"""Routed experts: permutation, grouped GEMM and activation of vllm-xpu-kernels 0.1.8
and 0.1.9, which count the rows of each expert (0.1.7 has their offsets instead)."""

import torch

from emulated_xpu.registry import implements

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_to_float(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 weights in fp32.

    Args:
        packed: `[N, K / 2]` bytes, the even column in the low nibble.
        scales: `[N, K / 32]` UE8M0 bytes, or the same as float8_e8m0fnu.
    """
    codes = packed.view(torch.uint8)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    signed = torch.tensor([*E2M1, *(-value for value in E2M1)])
    power = torch.ldexp(torch.ones(()), scales.view(torch.uint8).int() - 127)
    return signed[nibbles] * power.repeat_interleave(32, dim=-1)


@implements("_C::silu_and_mul")
def silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.float().chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate) * up)


@implements("_C::swigluoai_and_mul")
def swigluoai_and_mul(
    out: torch.Tensor, input: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> None:
    gate = input[..., ::2].float().clamp(max=limit)
    up = input[..., 1::2].float().clamp(-limit, limit)
    out.copy_((up + 1) * gate * torch.sigmoid(alpha * gate))


@implements("_moe_C::remap_hidden_states")
def remap_hidden_states(
    hidden_states: torch.Tensor,
    hidden_states_scales: torch.Tensor | None,
    remapped_hidden_states: torch.Tensor,
    remapped_hidden_states_scales: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    rows_per_expert: torch.Tensor,
    unpermuted_row_to_permuted_row: torch.Tensor,
    topk_ids: torch.Tensor,
    total_experts_num: int,
    local_experts_num: int,
) -> None:
    """Sort the rows by expert; one rank holds all experts."""
    if hidden_states_scales is not None or expert_map is not None:
        raise NotImplementedError("remapping of scales or of foreign experts")
    order = topk_ids.flatten().argsort(stable=True)
    remapped_hidden_states.copy_(hidden_states[order // topk_ids.shape[1]])
    rows_per_expert.copy_(topk_ids.flatten().bincount(minlength=local_experts_num))
    unpermuted_row_to_permuted_row.view(-1)[order] = torch.arange(
        len(order), dtype=unpermuted_row_to_permuted_row.dtype
    )


@implements("_xpu_C::cutlass_grouped_gemm_interface")
def cutlass_grouped_gemm_interface(
    ptr_A: torch.Tensor,
    ptr_B: torch.Tensor,
    ptr_scales: torch.Tensor | None,
    ptr_bias: torch.Tensor | None,
    ptr_D: torch.Tensor,
    rows_per_expert: torch.Tensor,
    N: int,
    K: int,
    num_experts: int,
    is_B_int4: bool,
    is_B_mxfp4: bool,
) -> torch.Tensor:
    """One product for each expert, with MXFP4 weights of shape `[E, N, K / 2]`."""
    if not is_B_mxfp4 or ptr_scales is None or ptr_bias is not None:
        raise NotImplementedError("grouped GEMM of other than MXFP4 without bias")
    start = 0
    for expert, rows in enumerate(rows_per_expert.tolist()):
        weight = mxfp4_to_float(ptr_B[expert], ptr_scales[expert])
        ptr_D[start : start + rows] = ptr_A[start : start + rows].float() @ weight.T
        start += rows
    return ptr_D


@implements("_moe_C::moe_gather")
def moe_gather(
    output: torch.Tensor,
    moe_output: torch.Tensor,
    topk_weights: torch.Tensor,
    unpermuted_row_to_permuted_row: torch.Tensor,
    num_experts: int,
) -> None:
    rows = moe_output[unpermuted_row_to_permuted_row.long()].float()
    output.copy_((rows * topk_weights.float()[..., None]).sum(1))
