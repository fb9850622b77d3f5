# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches of routed experts: the rows of pairs, and their sum by token."""

from collections.abc import Callable

import torch

from .._launch import cdiv, launch_options, next_power_of_2
from . import _experts_config as config
from ._experts_formats import Format
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

FEW_PAIRS = 64
"""So many pairs one sub-group looks through."""
BLOCK_D = 1024
"""Columns of a program of the last launch."""


def workspace_sizes(
    pairs: int, experts: int, hidden: int, intermediate: int, known: int
) -> tuple[int, int, int, int]:
    """Bytes of tile experts, tile pairs, activated rows, and rows of `down`.

    `pairs` pairs fall on `known` experts, `experts` of which are in memory.
    """
    block_m = config.block_m(pairs, known)
    tiles = num_tiles(pairs, experts, block_m)
    rows = tiles * block_m
    return 4 * tiles, 4 * rows, 2 * rows * intermediate, 2 * pairs * hidden


def workspace_bytes(sizes: tuple[int, ...]) -> int:
    """Bytes of a workspace with parts of `sizes` bytes."""
    return sum(cdiv(size, 16) * 16 for size in sizes)


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """bf16 rows as words of two values; copied if they begin between two words."""
    if rows.data_ptr() % 4 or rows.stride(0) % 2:
        rows = rows.contiguous()
    return rows.view(torch.int32)


def route(
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


def expert_rows(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    swiglu_limit: float | None,
    workspace: torch.Tensor,
    known: int,
    form: Format,
    route: Callable[..., None] = route,
) -> torch.Tensor:
    """What the chosen expert of each pair gives, in three launches.

    Arguments are those of `routed_experts`, checked, and not empty. `known` is the
    number of experts on which pairs fall: the order of sums depends on it, not on
    how many of them are in memory. `form` is that of the weights. `route` may do more
    than fill the tiles.

    Returns:
        Rows of shape `[T * K, H]`, bf16, in `workspace`. Those of pairs whose expert is
        not in memory keep what they had.

    """
    tokens, hidden = hidden_states.shape
    experts, columns, topk = w13.shape[0], w13.shape[1] // 2, topk_ids.shape[1]
    device = hidden_states.device
    pairs = tokens * topk
    parts, start = [], 0
    for size in workspace_sizes(pairs, experts, hidden, columns, known):
        parts.append(workspace[start : start + size])
        start += cdiv(size, 16) * 16
    tile_experts, tile_pairs = (part.view(torch.int32) for part in parts[:2])
    activated = parts[2].view(torch.bfloat16)
    rows = parts[3].view(torch.bfloat16).view(pairs, hidden)
    block_m = config.block_m(pairs, known)
    route(topk_ids, expert_map, experts, tile_experts, tile_pairs, block_m)
    tiles, like = tile_experts.shape[0], num_tiles(pairs, known, block_m)
    x = _in_words(hidden_states)
    stored = {
        "FORMAT": form.name,
        "GROUP_SHIFT": (form.columns // LANES).bit_length() - 1,
        "BLOCK_SHIFT": (form.values // TILE_K).bit_length() - 1,
    }
    first = config.product(block_m, like, hidden, 2 * columns, device.type, form.bits)
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
        **stored,
        HAS_LIMIT=swiglu_limit is not None,
        EVEN_K=first.even_k,
        BLOCK_M=block_m,
        WARPS_K=first.warps_k,
        WARPS_N=first.warps_n,
        COLS=first.cols,
        AHEAD=first.ahead,
        PAIRED=first.paired,
        **launch_options(
            device, first.warps_k * first.warps_n, first.stages, first.grf
        ),
    )
    second = config.product(block_m, like, columns, hidden, device.type, form.bits)
    _down_kernel[(second.programs, tiles)](
        activated.view(torch.int32),
        w2.view(torch.int32),
        w2_scale,
        tile_experts,
        tile_pairs,
        rows,
        columns // TILE_K,
        hidden,
        **stored,
        EVEN_K=second.even_k,
        BLOCK_M=block_m,
        WARPS_K=second.warps_k,
        WARPS_N=second.warps_n,
        COLS=second.cols,
        AHEAD=second.ahead,
        PAIRED=second.paired,
        **launch_options(
            device, second.warps_k * second.warps_n, second.stages, second.grf
        ),
    )
    return rows


def combine(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    out: torch.Tensor,
) -> None:
    """Write the weighted sum of each token's rows to `out`, in one launch.

    `experts` are here; pairs of others add nothing.
    """
    tokens, topk = topk_ids.shape
    hidden = out.shape[1]
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
        **launch_options(out.device, num_warps=4),
    )
