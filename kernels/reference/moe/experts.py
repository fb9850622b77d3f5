# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of routed experts with MXFP4, FP8 and INT4 weights."""

import torch
import torch.nn.functional as F

from .._quant import E2M1_VALUES

BLOCK = 32
NAN_EXPONENT = 255


def mxfp4_values(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float64 values `[..., K]` of bytes `[..., K / 2]` and UE8M0 exponents `[..., K /
    32]`; NaN under exponent 255."""
    nibbles = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=weight.device)
    values = torch.cat((grid, -grid))[nibbles].unflatten(-1, (-1, BLOCK))
    values = torch.ldexp(values, scale.int().unsqueeze(-1) - 127)
    nan = (scale == NAN_EXPONENT).unsqueeze(-1)
    return values.masked_fill(nan, torch.nan).flatten(-2)


def fp8_values(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """Float64 values `[N, K]` of e4m3 codes and a scale for each `block`; NaN in all of
    a block that has a code of NaN."""
    values, scales = weight.double(), scale.double()
    for axis, size in enumerate(block):
        scales = scales.repeat_interleave(size, axis).narrow(
            axis, 0, values.shape[axis]
        )
    values *= scales
    for part in (
        rows for half in values.split(block[0]) for rows in half.split(block[1], 1)
    ):
        part += torch.where(part.isnan().any(), torch.nan, 0.0)
    return values


def int4_values(weight: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Float64 values `[..., K]` of bytes `[..., K / 2]`, whose nibbles have their zero
    at 8, and a scale for each `group`."""
    values = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).double() - 8
    scales = scale.double().repeat_interleave(group, -1)
    return values * scales[..., : values.shape[-1]]


def weight_values(
    weight: torch.Tensor, scale: torch.Tensor, scale_block: tuple[int, int] | None
) -> torch.Tensor:
    """Float64 values `[N, K]` of an expert; types tell the format."""
    if scale.dtype == torch.float32:
        return fp8_values(weight, scale, scale_block or (128, 128))
    if scale.dtype == torch.bfloat16:
        return int4_values(weight, scale, (scale_block or (1, 128))[1])
    return mxfp4_values(weight, scale)


def local_experts(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int
) -> torch.Tensor:
    """The number of each chosen expert on this rank, or -1 if it is not here."""
    ids = topk_ids.long()
    known = num_experts if expert_map is None else len(expert_map)
    here = (ids >= 0) & (ids < known)
    experts = torch.where(here, ids, 0)
    if expert_map is not None:
        experts = expert_map.long()[experts]
    here &= (experts >= 0) & (experts < num_experts)
    return torch.where(here, experts, -1)


def routed_experts(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
    scale_block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.moe.experts.routed_experts`; float64 result.

    The weights are as in a checkpoint, not as `arrange_mxfp4_experts` and its kin
    arrange them.
    """
    x = hidden_states.double()
    experts = local_experts(topk_ids, expert_map, len(w13))
    out = torch.zeros_like(x)
    for expert in experts[experts >= 0].unique().tolist():
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        first = weight_values(w13[expert], w13_scale[expert], scale_block)
        second = weight_values(w2[expert], w2_scale[expert], scale_block)
        gate_up = x[tokens] @ first.T
        gate, up = gate_up.chunk(2, -1)
        if swiglu_limit is not None:
            gate = gate.clamp(max=swiglu_limit)
            up = up.clamp(-swiglu_limit, swiglu_limit)
        rows = (F.silu(gate) * up) @ second.T
        weights = topk_weights.double()[tokens, places]
        out.index_add_(0, tokens, rows * weights[:, None])
    return out
