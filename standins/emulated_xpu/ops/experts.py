# SPDX-License-Identifier: Apache-2.0
"""Routed experts: permutation, grouped GEMM and activation."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from standins.emulated_xpu.wheel.formats import int4_to_float, mxfp4_to_float
from standins.emulated_xpu.wheel.implementations import implements
from standins.emulated_xpu.wheel.pins import kernels_version, schemas


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
    """Sort the rows by expert.

    A row whose expert is not on this rank (-1 for a padded token, or by `expert_map`)
    gets the position -1.
    """
    if hidden_states_scales is not None:
        raise NotImplementedError("remapping of scales")
    experts, position = topk_ids.flatten(), unpermuted_row_to_permuted_row.view(-1)
    if expert_map is not None:
        experts = expert_map[experts.long()]
    known = experts[experts >= 0]
    order = experts.argsort(stable=True)[len(experts) - len(known) :]
    remapped_hidden_states[: len(order)] = hidden_states[order // topk_ids.shape[1]]
    rows_per_expert.copy_(known.bincount(minlength=local_experts_num))
    position.fill_(-1)
    position[order] = torch.arange(len(order), dtype=position.dtype)


@implements("_moe_C::init_expert_map")
def init_expert_map(
    expert_map: torch.Tensor, num_experts: int, ep_rank: int, ep_size: int
) -> None:
    """Number the `num_experts` experts of this rank from 0; all others get -1."""
    expert_map.fill_(-1)
    first = ep_rank * num_experts
    expert_map[first : first + num_experts] = torch.arange(num_experts)


@implements("_xpu_C::cutlass_grouped_gemm_interface")
def cutlass_grouped_gemm_interface(*args: Any, **kwargs: Any) -> torch.Tensor:
    """One product per expert, with MXFP4 or signed INT4 weights of `[E, N, K / 2]`.

    Up to 0.1.10 two flags tell the format of the weights; later versions read it from
    their dtype, and take a scale of the activations as well.
    """
    arguments = grouped_gemm_arguments(*args, **kwargs)
    to_float = int4_to_float if arguments.is_int4 else mxfp4_to_float
    rows, out = arguments.rows.float(), arguments.out
    start = 0
    for expert, count in enumerate(arguments.rows_per_expert.tolist()):
        weight = to_float(arguments.packed[expert], arguments.scales[expert])
        out[start : start + count] = (rows[start : start + count] @ weight.T).to(
            out.dtype
        )
        start += count
    return out.view_as(out)


@dataclass(frozen=True)
class GroupedGemm:
    """The arguments of a grouped product, by what they are in every version."""

    rows: torch.Tensor
    packed: torch.Tensor
    scales: torch.Tensor
    out: torch.Tensor
    rows_per_expert: torch.Tensor
    is_int4: bool


def grouped_gemm_arguments(*args: Any, **kwargs: Any) -> GroupedGemm:
    """The arguments of the op under the pinned version's schema.

    Raises:
        RuntimeError: FP8 weights with more than one scale for each expert, in the
            words of the op.
        NotImplementedError: other weights than MXFP4 and INT4, a bias, or a scale of
            the activations.
    """
    names = _grouped_gemm_arguments(kernels_version())
    arguments = dict(zip(names, args, strict=False)) | kwargs
    weights = arguments["ptr_B"]
    scales = arguments.get("ptr_B_scale", arguments.get("ptr_scales"))
    if weights.dtype == torch.float8_e4m3fn and scales is not None and scales.dim() > 1:
        raise RuntimeError("ptr_scales of fp8 must be 1D [num_experts]")
    is_mxfp4 = arguments.get("is_B_mxfp4", weights.dtype == torch.float4_e2m1fn_x2)
    is_int4 = arguments.get("is_B_int4", weights.dtype == torch.int8)
    others = [arguments["ptr_bias"], arguments.get("ptr_A_scale")]
    if is_mxfp4 == is_int4 or scales is None or any(o is not None for o in others):
        raise NotImplementedError("grouped GEMM of other than 4 bits without bias")
    return GroupedGemm(
        arguments["ptr_A"],
        weights.view(torch.uint8),
        scales,
        arguments["ptr_D"],
        arguments["rows_per_expert"],
        is_int4,
    )


@cache
def _grouped_gemm_arguments(version: str) -> tuple[str, ...]:
    schema = schemas(version)["_xpu_C::cutlass_grouped_gemm_interface"]
    parsed: Any = torch._C.parse_schema(schema)
    return tuple(argument.name for argument in parsed.arguments)


@implements("_moe_C::moe_gather")
def moe_gather(
    output: torch.Tensor,
    moe_output: torch.Tensor,
    topk_weights: torch.Tensor,
    unpermuted_row_to_permuted_row: torch.Tensor,
    num_experts: int,
) -> None:
    """Sum each token's rows by its weights."""
    position = unpermuted_row_to_permuted_row.long()
    rows = moe_output[position].float() * topk_weights.float()[..., None]
    output.copy_(rows.where(position[..., None] >= 0, 0.0).sum(1))


@implements("_moe_C::moe_align_block_size")
def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    maybe_expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Rows by expert, each expert's filled up to whole blocks with `topk_ids.numel()`;
    the expert of each block; the number of rows with what fills them up.

    `scatter_idx` is there since 0.1.16.2; no pinned release passes it.
    """
    if maybe_expert_map is not None:
        raise NotImplementedError("alignment of the experts of several ranks")
    if scatter_idx is not None:
        raise NotImplementedError("where each row goes")
    experts = topk_ids.flatten()
    sorted_token_ids.fill_(len(experts))
    experts_ids.fill_(-1)
    start = 0
    for expert in range(num_experts):
        rows = (experts == expert).nonzero().flatten()
        blocks = -(-len(rows) // block_size)
        sorted_token_ids[start : start + len(rows)] = rows
        first = start // block_size
        experts_ids[first : first + blocks] = expert
        start += blocks * block_size
    num_tokens_post_pad.fill_(start)


@implements("_moe_C::moe_sum")
def moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """`[T, k, H]` summed over a token's experts, which weighted their rows already."""
    output.copy_(input.float().sum(1))
