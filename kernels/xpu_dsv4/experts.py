# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed experts with MXFP4 weights in four launches: tiles, gate and up, down, sum.

Source of the formulas: DeepSeek-V3, arXiv:2412.19437, equations 12 to 16; clamp as in
DeepSeek-V4's own code; MXFP4 in OCP Microscaling Formats (MX), version 1.0.
"""

import torch

from ._checks import check_once
from ._experts_checks import check_experts, check_weight
from ._experts_launch import combine, expert_rows, workspace_bytes, workspace_sizes
from ._experts_weights import LANES, TILE_BYTES


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
    check_weight("weight", weight, scale, None, None)
    for codes, exponents in zip(weight, scale, strict=True):
        for part, size in ((codes, TILE_BYTES), (exponents, 1)):
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
            e2m1 codes of gate, then up, of shape `[E, 2 * I, H / 2]`, uint8, arranged
            by `arrange_mxfp4_experts`. I is a multiple of 32.
        w13_scale (torch.Tensor):
            UE8M0 exponents of shape `[E, 2 * I, H / 32]`, uint8, arranged with it. 255
            makes NaN of its column.
        w2 (torch.Tensor):
            e2m1 codes of shape `[E, H, I / 2]`, uint8, arranged likewise.
        w2_scale (torch.Tensor):
            UE8M0 exponents of shape `[E, H, I / 32]`, uint8, arranged with it.
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

    Returns:
        Rows of shape `[T, H]`, bf16.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    arguments = (hidden_states, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids)
    experts, columns, topk = w13.shape[0], w13.shape[1] // 2, topk_ids.shape[1]
    check_once(check_experts, *arguments, expert_map, out, workspace, experts)
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
    )
    combine(rows, topk_weights, topk_ids, expert_map, experts, out)
    return out
