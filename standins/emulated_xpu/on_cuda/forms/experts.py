# SPDX-License-Identifier: Apache-2.0
"""Routed experts: the permutation and the grouped product."""

from typing import Any

import torch

from standins.emulated_xpu.on_cuda.forms.products import Key, key_of
from standins.emulated_xpu.on_cuda.forms.table import device_form
from standins.emulated_xpu.ops.experts import grouped_gemm_arguments
from standins.emulated_xpu.wheel.formats import mxfp4_to_float

_dequantized: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights `[E, N, K]` in bf16 by place, each with the tensor that keeps its memory."""


@device_form("_moe_C::remap_hidden_states")
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
    """As the stand-in, but rows whose expert is on another rank stay, at the end."""
    if hidden_states_scales is not None:
        raise NotImplementedError("remapping of scales")
    experts = topk_ids.flatten().long()
    if expert_map is not None:
        experts = torch.where(experts >= 0, expert_map[experts.clamp(min=0)].long(), -1)
    known = experts >= 0
    order = torch.where(known, experts, local_experts_num).argsort(stable=True)
    remapped_hidden_states[: len(order)] = hidden_states[order // topk_ids.shape[1]]
    numbers = torch.arange(local_experts_num, device=experts.device)
    rows_per_expert.copy_((experts[:, None] == numbers).sum(0))
    place = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    position = torch.where(known, place, -1)
    unpermuted_row_to_permuted_row.view(-1).copy_(position)


@device_form("_xpu_C::cutlass_grouped_gemm_interface")
def cutlass_grouped_gemm_interface(*args: Any, **kwargs: Any) -> torch.Tensor:
    """As the stand-in, for MXFP4 only, whose values are exact in bf16. Rows after those
    of the last expert get any values."""
    arguments = grouped_gemm_arguments(*args, **kwargs)
    if arguments.is_int4:
        raise NotImplementedError("grouped GEMM of INT4 on the device")
    weights = _weights(arguments.packed, arguments.scales)
    ends = arguments.rows_per_expert.cumsum(0).int()
    rows, out = arguments.rows.bfloat16(), arguments.out
    if not rows.is_cpu:
        out.copy_(torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends))
        return out.view_as(out)
    # A CPU's grouped product would ask for the ends.
    expert = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
    for number, weight in enumerate(weights):
        mine = (expert == number)[:, None]
        out.copy_(
            torch.where(mine, (rows.float() @ weight.float().T).to(out.dtype), out)
        )
    return out.view_as(out)


def _weights(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    key = key_of(packed)
    if key not in _dequantized:
        each = [mxfp4_to_float(*expert) for expert in zip(packed, scales, strict=True)]
        _dequantized[key] = (packed, torch.stack([e.bfloat16() for e in each]))
    return _dequantized[key][1]
