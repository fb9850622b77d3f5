# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks of the arguments of routed experts."""

import math

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from .._launch import cdiv
from ._experts_formats import Format
from ._experts_launch import workspace_bytes, workspace_sizes
from ._experts_weights import LANES, TILE_K


def _is_power_of_2(size: float) -> bool:
    return size >= 1 and math.frexp(size)[0] == 0.5


def check_weight(
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    form: Format,
    columns: int | None = None,
    depth: int | None = None,
) -> None:
    """Raise unless codes are `[E, columns, depth]` values of `form`, and scales those
    of its blocks."""
    if form.columns != 1 and not _is_power_of_2(form.columns / LANES):
        fail("scale_block[0]", form.columns, f"1, or {LANES} times a power of 2")
    if not _is_power_of_2(form.values / TILE_K):
        fail("scale_block[1]", form.values, f"{TILE_K} times a power of 2")
    check_dtype(name, weight, form.codes)
    width = None if depth is None else form.width(depth)
    check_shape(name, weight, None, columns, width)
    experts, columns, width = weight.shape
    if columns % LANES:
        fail(f"{name}.shape[1]", columns, f"a multiple of {LANES}")
    if not width or width % form.width(TILE_K):
        fail(f"{name}.shape[2]", width, f"a multiple of {form.width(TILE_K)}")
    check_dtype(f"{name}_scale", scale, form.scales)
    blocks = cdiv(width, form.width(form.values))
    check_shape(f"{name}_scale", scale, experts, cdiv(columns, form.columns), blocks)
    for part, tensor in ((name, weight), (f"{name}_scale", scale)):
        if not tensor.is_contiguous():
            fail(f"{part}.stride()", tuple(tensor.stride()), "a contiguous tensor")


def check_experts(
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
    known: int,
    form: Format,
) -> None:
    """Raise unless these are arguments of `routed_experts`, whose pairs fall on `known`
    experts, with weights of `form`."""
    check_dtype("hidden_states", hidden_states, torch.bfloat16)
    check_shape("hidden_states", hidden_states, None, None)
    check_inner_contiguous("hidden_states", hidden_states)
    tokens, hidden = hidden_states.shape
    check_weight("w13", w13, w13_scale, form, None, hidden)
    experts, columns, _ = w13.shape
    for half in (TILE_K, form.columns):
        if columns % (2 * half):
            fail("w13.shape[1]", columns, f"a multiple of {2 * half}")
    check_weight("w2", w2, w2_scale, form, hidden, columns // 2)
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
        pairs = topk_ids.numel()
        sizes = workspace_sizes(pairs, experts, hidden, columns // 2, known)
        need = workspace_bytes(sizes)
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
