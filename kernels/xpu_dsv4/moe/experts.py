# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed experts in four launches: tiles, gate and up, down, sum.

Weights are in MXFP4, in FP8 under a scale for each block, or in INT4 under a scale for
each group. Source of the formulas: DeepSeek-V3, arXiv:2412.19437, equations 12 to 16;
clamp as in DeepSeek-V4's own code; MXFP4 in OCP Microscaling Formats (MX), version 1.0.
"""

import torch

from .._checks import check_once
from ._experts_checks import check_experts, check_weight
from ._experts_formats import FP8, INT4, MXFP4, format_of
from ._experts_launch import combine, expert_rows, workspace_bytes, workspace_sizes
from ._experts_weights import LANES, TILE_K


def arrange_mxfp4_experts(weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Bring a checkpoint's MXFP4 experts into the order of `routed_experts`, in place.

    Sixteen columns times 32 values become contiguous, so a sub-group reads them in one
    message. Needs memory for one expert besides. A second call destroys the weights.

    Args:
        weight (torch.Tensor):
            e2m1 codes of shape `[E, N, K / 2]`, uint8, contiguous: two per byte, the
            even one in the low nibble. N is a multiple of 16, K of 32.
        scale (torch.Tensor):
            UE8M0 exponents of shape `[E, N, K / 32]`, uint8, contiguous.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_weight("weight", weight, scale, MXFP4)
    for codes, exponents in zip(weight, scale, strict=True):
        _arrange(codes, TILE_K // 2)
        _arrange(exponents, 1)


def arrange_fp8_experts(
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_block: tuple[int, int] = (FP8.columns, FP8.values),
) -> None:
    """Bring a checkpoint's FP8 experts into the order of `routed_experts`, in place.

    As `arrange_mxfp4_experts`. A code of NaN makes NaN of its block's scale: kernels
    would take it for 480.

    Args:
        weight (torch.Tensor):
            e4m3 codes of shape `[E, N, K]`, contiguous. N is a multiple of 16, K of 32.
        scale (torch.Tensor):
            Scales of shape `[E, N / columns, K / values]`, rounded up, fp32,
            contiguous, in the order in which they stay.
        scale_block (tuple[int, int]):
            Columns and values under a scale: 16 and 32 times powers of 2.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    form = format_of("weight", weight, scale, scale_block)
    check_weight("weight", weight, scale, form)
    places = (torch.arange(size, device=weight.device) for size in weight.shape[1:])
    columns, values = next(places)[::LANES, None], next(places)[::TILE_K]
    blocks = columns // form.columns, values // form.values
    for codes, factors in zip(weight.view(torch.uint8), scale, strict=True):
        is_nan = (codes & 0x7F == 0x7F).view(-1, LANES, len(values), TILE_K)
        nan = torch.zeros(len(columns), len(values)).to(factors)
        nan.masked_fill_(is_nan.any(3).any(1), torch.nan)
        factors.index_put_(blocks, nan, accumulate=True)
        halves = codes.view(-1, TILE_K // 2, 2).transpose(1, 2)
        codes.copy_(halves.reshape(codes.shape))
        _arrange(codes, TILE_K)


def arrange_int4_experts(
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_block: tuple[int, int] = (INT4.columns, INT4.values),
) -> None:
    """Bring a checkpoint's INT4 experts into the order of `routed_experts`, in place.

    As `arrange_mxfp4_experts`.

    Args:
        weight (torch.Tensor):
            Codes of shape `[E, N, K / 2]`, uint8, contiguous: a value plus 8, two per
            byte, the even one in the low nibble. N is a multiple of 16, K of 32.
        scale (torch.Tensor):
            Scales of shape `[E, N, K / values]`, rounded up, bf16, contiguous.
        scale_block (tuple[int, int]):
            1, and values under a scale: 32 times a power of 2.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    form = format_of("weight", weight, scale, scale_block)
    check_weight("weight", weight, scale, form)
    for codes, factors in zip(weight, scale, strict=True):
        _arrange(codes, TILE_K // 2)
        _arrange(factors, 1)


def _arrange(part: torch.Tensor, size: int) -> None:
    """Bring `size` elements of each of 16 neighbouring rows together, in place."""
    tiles = part.view(-1, LANES, part.shape[1] // size, size)
    part.copy_(tiles.transpose(1, 2).reshape(part.shape))


def workspace_size(
    tokens: int, topk: int, experts: int, hidden: int, intermediate: int
) -> int:
    """Bytes of memory that `routed_experts` needs besides its arguments and result.

    Args:
        tokens (int): rows of `hidden_states`.
        topk (int): experts of a token.
        experts (int): experts of this rank.
        hidden (int): size of a row.
        intermediate (int): columns of the gate on this rank.

    """
    sizes = workspace_sizes(tokens * topk, experts, hidden, intermediate, experts)
    return workspace_bytes(sizes)


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
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    scale_block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Each token's experts, weighted and summed in the order of `topk_ids`.

    Four launches, none of which waits for the host; how many programs they have depends
    on sizes alone, so a captured graph is right for other ids. Equal calls give equal
    bits. With gate = x w1, up = x w3, L = `swiglu_limit`, an expert gives
    (silu(min(gate, L)) * clamp(up, -L, L)) w2.

    Args:
        hidden_states (torch.Tensor):
            Rows of shape `[T, H]`, bf16; may be strided. H is a multiple of 32.
        w13 (torch.Tensor):
            Codes of gate, then up: e2m1 or INT4 of shape `[E, 2 * I, H / 2]`, uint8,
            or e4m3 of shape `[E, 2 * I, H]`, arranged by `arrange_mxfp4_experts` and
            its kin. I is a multiple of 32, and of the columns under a scale.
        w13_scale (torch.Tensor):
            Arranged with it: UE8M0 exponents of shape `[E, 2 * I, H / 32]`, uint8, of
            which 255 makes NaN of its column; for INT4 bf16 of shape `[E, 2 * I, H /
            values]`; for FP8 fp32 of shape `[E, 2 * I / columns, H / values]`.
        w2 (torch.Tensor):
            Codes in the same format, of shape `[E, H, I / 2]` or `[E, H, I]`.
        w2_scale (torch.Tensor):
            Its scales, with H for `2 * I` and I for H, rounded up.
        topk_weights (torch.Tensor):
            Weight of each chosen expert, of shape `[T, K]`, fp32 or bf16.
        topk_ids (torch.Tensor):
            Chosen experts, of shape `[T, K]`, int32 or int64. An expert that does not
            exist, or is not on this rank, adds nothing; one that is chosen twice counts
            twice.
        expert_map (torch.Tensor | None):
            Number on this rank of each expert, or -1, of shape `[experts of all
            ranks]`, int32 or int64. None: all are here.
        swiglu_limit (float | None):
            The clamp; None for none.
        out (torch.Tensor | None):
            Where to write the result, of shape `[T, H]`, bf16. None allocates.
        workspace (torch.Tensor | None):
            `workspace_size` bytes, uint8. None allocates.
        scale_block (tuple[int, int] | None):
            Columns and values under a scale, for FP8 and INT4; None: 128 x 128 and
            1 x 128.

    Returns:
        Rows of shape `[T, H]`, bf16.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    form = format_of("w13", w13, w13_scale, scale_block)
    arguments = (hidden_states, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids)
    experts, columns, topk = w13.shape[0], w13.shape[1] // 2, topk_ids.shape[1]
    check_once(check_experts, *arguments, expert_map, out, workspace, experts, form)
    tokens, hidden = hidden_states.shape
    device = hidden_states.device
    if out is None:
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=device)
    pairs = tokens * topk
    if not pairs or not experts:
        return out.zero_()
    if workspace is None:
        size = workspace_size(tokens, topk, experts, hidden, columns)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
    rows = expert_rows(
        hidden_states,
        w13,
        w13_scale,
        w2,
        w2_scale,
        topk_ids,
        expert_map,
        swiglu_limit,
        workspace,
        experts,
        form,
    )
    combine(rows, topk_weights, topk_ids, expert_map, experts, out)
    return out
