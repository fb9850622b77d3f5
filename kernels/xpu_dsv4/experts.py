# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed experts with MXFP4 weights in four launches: tiles, gate and up, down, sum.

Source of the formulas: DeepSeek-V3, arXiv:2412.19437, equations 12 to 16; clamp as in
DeepSeek-V4's own code; MXFP4 in OCP Microscaling Formats (MX), version 1.0.
"""

import torch

from . import _experts_config as config
from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_once,
    check_same_device,
    check_shape,
    fail,
)
from ._experts_kernels import _down_kernel, _gate_up_kernel
from ._experts_route import (
    CHUNK,
    _combine_kernel,
    _route_few_kernel,
    _route_many_kernel,
    by_pair,
    num_tiles,
)
from ._experts_weights import LANES, TILE_K
from ._launch import cdiv, launch_options, next_power_of_2

FEW_PAIRS = 64
"""So many pairs one sub-group looks through."""
TILE_BYTES = TILE_K // 2
"""Bytes of a column in a tile."""
BLOCK_D = 1024
"""Columns of a program of the last launch."""


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
    _check_weight("weight", weight, scale, None, None)
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
    sizes = _sizes(tokens * topk, experts, hidden, intermediate)
    return sum(cdiv(size, 16) * 16 for size in sizes)


def _sizes(
    pairs: int, experts: int, hidden: int, intermediate: int
) -> tuple[int, int, int, int]:
    """Bytes of tile experts, tile pairs, activated rows, and rows of `down`."""
    block_m = config.block_m(pairs, experts)
    tiles = num_tiles(pairs, experts, block_m)
    rows = tiles * block_m
    return 4 * tiles, 4 * rows, 2 * rows * intermediate, 2 * pairs * hidden


def _check_weight(
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    columns: int | None,
    depth: int | None,
) -> None:
    check_dtype(name, weight, torch.uint8)
    check_shape(name, weight, None, columns, None if depth is None else depth // 2)
    experts, columns, width = weight.shape
    if columns % LANES:
        fail(f"{name}.shape[1]", columns, f"a multiple of {LANES}")
    if not width or width % TILE_BYTES:
        fail(f"{name}.shape[2]", width, f"a multiple of {TILE_BYTES}")
    check_dtype(f"{name}_scale", scale, torch.uint8)
    check_shape(f"{name}_scale", scale, experts, columns, width // TILE_BYTES)
    for part, tensor in ((name, weight), (f"{name}_scale", scale)):
        if not tensor.is_contiguous():
            fail(f"{part}.stride()", tuple(tensor.stride()), "a contiguous tensor")


def _check(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    check_dtype("hidden_states", hidden_states, torch.bfloat16)
    check_shape("hidden_states", hidden_states, None, None)
    check_inner_contiguous("hidden_states", hidden_states)
    tokens, hidden = hidden_states.shape
    _check_weight("w13", w13, w13_scale, None, hidden)
    experts, columns, _ = w13.shape
    if columns % (2 * TILE_K):
        fail("w13.shape[1]", columns, f"a multiple of {2 * TILE_K}")
    _check_weight("w2", w2, w2_scale, hidden, columns // 2)
    if w2.shape[0] != experts:
        fail("w2.shape[0]", w2.shape[0], f"{experts}, as of w13")
    check_dtype("topk_ids", topk_ids, torch.int32, torch.int64)
    check_shape("topk_ids", topk_ids, tokens, None)
    check_inner_contiguous("topk_ids", topk_ids)
    check_dtype("topk_weights", topk_weights, torch.float32, torch.bfloat16)
    check_shape("topk_weights", topk_weights, *topk_ids.shape)
    check_inner_contiguous("topk_weights", topk_weights)
    if expert_map is not None:
        check_dtype("expert_map", expert_map, torch.int32, torch.int64)
        check_shape("expert_map", expert_map, None)
        check_inner_contiguous("expert_map", expert_map)
    if out is not None:
        check_dtype("out", out, torch.bfloat16)
        check_shape("out", out, tokens, hidden)
        check_inner_contiguous("out", out)
    if workspace is not None:
        check_dtype("workspace", workspace, torch.uint8)
        need = workspace_size(tokens, topk_ids.shape[1], experts, hidden, columns // 2)
        if workspace.dim() != 1 or workspace.numel() < need:
            fail("workspace.shape", list(workspace.shape), f"[{need}] or more")
        check_inner_contiguous("workspace", workspace)
        if workspace.data_ptr() % 16:
            fail("workspace.data_ptr()", workspace.data_ptr(), "a multiple of 16")
    check_same_device(
        hidden_states=hidden_states,
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        out=out,
        workspace=workspace,
    )


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """bf16 rows as words of two values; copied if they begin between two words."""
    if rows.data_ptr() % 4 or rows.stride(0) % 2:
        rows = rows.contiguous()
    return rows.view(torch.int32)


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
    check_once(_check, *arguments, expert_map, out, workspace)
    tokens, hidden = hidden_states.shape
    experts, columns, topk = w13.shape[0], w13.shape[1] // 2, topk_ids.shape[1]
    device = hidden_states.device
    if out is None:
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=device)
    pairs = tokens * topk
    if not pairs or not experts:
        return out.zero_()
    sizes = _sizes(pairs, experts, hidden, columns)
    if workspace is None:
        size = workspace_size(tokens, topk, experts, hidden, columns)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
    parts, start = [], 0
    for size in sizes:
        parts.append(workspace[start : start + size])
        start += cdiv(size, 16) * 16
    tile_experts, tile_pairs = (part.view(torch.int32) for part in parts[:2])
    activated = parts[2].view(torch.bfloat16)
    rows = parts[3].view(torch.bfloat16).view(pairs, hidden)
    block_m = config.block_m(pairs, experts)
    _route(topk_ids, expert_map, experts, tile_experts, tile_pairs, block_m)
    tiles = tile_experts.shape[0]
    x = _in_words(hidden_states)
    first = config.product(block_m, tiles, hidden, 2 * columns)
    _gate_up_kernel[(first.programs, tiles)](
        x,
        w13.view(torch.int32),
        w13_scale,
        tile_experts,
        tile_pairs,
        activated,
        hidden // TILE_K,
        columns,
        topk,
        0.0 if swiglu_limit is None else swiglu_limit,
        x.stride(0),
        HAS_LIMIT=swiglu_limit is not None,
        EVEN_K=first.even_k,
        BLOCK_M=block_m,
        WARPS_K=first.warps_k,
        WARPS_N=first.warps_n,
        COLS=first.cols,
        **launch_options(
            device, num_warps=first.warps_k * first.warps_n, grf=first.grf
        ),
    )
    second = config.product(block_m, tiles, columns, hidden)
    _down_kernel[(second.programs, tiles)](
        activated.view(torch.int32),
        w2.view(torch.int32),
        w2_scale,
        tile_experts,
        tile_pairs,
        rows,
        columns // TILE_K,
        hidden,
        EVEN_K=second.even_k,
        BLOCK_M=block_m,
        WARPS_K=second.warps_k,
        WARPS_N=second.warps_n,
        COLS=second.cols,
        **launch_options(
            device, num_warps=second.warps_k * second.warps_n, grf=second.grf
        ),
    )
    _combine_kernel[(tokens, cdiv(hidden, BLOCK_D))](
        rows,
        topk_ids,
        topk_weights,
        topk_ids if expert_map is None else expert_map,
        out,
        hidden,
        experts if expert_map is None else expert_map.shape[0],
        experts,
        topk_ids.stride(0),
        topk_weights.stride(0),
        out.stride(0),
        HAS_MAP=expert_map is not None,
        TOPK=topk,
        BLOCK_D=BLOCK_D,
        **launch_options(device, num_warps=4),
    )
    return out


def _route(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    tile_experts: torch.Tensor,
    tile_pairs: torch.Tensor,
    block_m: int,
) -> None:
    """Fill `tile_experts` and `tile_pairs`, in one launch."""
    pairs, topk = topk_ids.numel(), topk_ids.shape[1]
    has_map = expert_map is not None
    where = (topk_ids if expert_map is None else expert_map, tile_experts, tile_pairs)
    known = experts if expert_map is None else expert_map.shape[0]
    numbers = (topk, known, experts, topk_ids.stride(0))
    if by_pair(pairs, experts, block_m):
        few = pairs <= FEW_PAIRS
        _route_few_kernel[(pairs,)](
            topk_ids,
            *where,
            pairs,
            *numbers,
            HAS_MAP=has_map,
            BLOCK_M=block_m,
            BLOCK_P=FEW_PAIRS if few else next_power_of_2(max(pairs, CHUNK // 2)),
            **launch_options(topk_ids.device, num_warps=1 if few else 4),
        )
        return
    _route_many_kernel[(experts,)](
        topk_ids,
        *where,
        pairs,
        tile_experts.shape[0],
        *numbers,
        HAS_MAP=has_map,
        IS_FLAT=topk_ids.stride(0) == topk,
        BLOCK_M=block_m,
        CHUNK=CHUNK if pairs > CHUNK // 2 else CHUNK // 2,
        **launch_options(topk_ids.device, num_warps=4),
    )
