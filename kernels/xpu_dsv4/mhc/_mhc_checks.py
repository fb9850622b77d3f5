# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that the hyper-connections' functions share."""

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from ._mhc_kernels import HC_MULT

NUM_GATES = HC_MULT * (2 + HC_MULT)


def check_streams(name: str, residual: torch.Tensor) -> torch.Tensor:
    """Check `residual` and flatten its leading dimensions: `[T, 4, hidden]`."""
    check_dtype(name, residual, torch.bfloat16)
    if residual.dim() < 2 or residual.shape[-2] != HC_MULT:
        fail(f"{name}.shape", list(residual.shape), f"[..., {HC_MULT}, hidden]")
    streams = residual.reshape(-1, HC_MULT, residual.shape[-1])
    check_inner_contiguous(name, streams)
    return streams


def check_gates(
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    gates: int,
    scales: int,
    width: int,
) -> None:
    """Raise unless the projection of `width` columns, the scales and the biases are
    fp32 and fit."""
    check_shape("fn", fn, gates, width)
    check_shape("hc_scale", hc_scale, scales)
    check_shape("hc_base", hc_base, gates)
    for name, tensor in (("fn", fn), ("hc_scale", hc_scale), ("hc_base", hc_base)):
        check_dtype(name, tensor, torch.float32)
        check_inner_contiguous(name, tensor)


def check_repeats(sinkhorn_repeat: int) -> None:
    """Raise unless Sinkhorn's rounds end with the columns normalized."""
    if sinkhorn_repeat < 1:
        fail("sinkhorn_repeat", sinkhorn_repeat, "at least 1")


def check_norm(weight: torch.Tensor, hidden: int) -> None:
    """Raise unless `weight` can normalize a sublayer's input."""
    check_shape("norm_weight", weight, hidden)
    check_inner_contiguous("norm_weight", weight)


def check_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check a post part's arguments and flatten their leading dimensions.

    Returns:
        (x, streams, post, comb): `[T, hidden]`, `[T, 4, hidden]`, `[T, 4]`, `[T, 16]`.

    """
    streams = check_streams("residual", residual)
    tokens, _, hidden = streams.shape
    outer = residual.shape[:-2]
    check_dtype("x", x, torch.bfloat16)
    check_shape("x", x, *outer, hidden)
    check_inner_contiguous("x", x)
    if post_layer_mix.numel() != tokens * HC_MULT:
        fail("post_layer_mix.shape", list(post_layer_mix.shape), "[..., 4, 1]")
    check_shape("comb_res_mix", comb_res_mix, *outer, HC_MULT, HC_MULT)
    check_dtype("post_layer_mix", post_layer_mix, torch.float32)
    check_dtype("comb_res_mix", comb_res_mix, torch.float32)
    check_same_device(
        residual=residual, x=x, post_layer_mix=post_layer_mix, comb_res_mix=comb_res_mix
    )
    return (
        x.reshape(tokens, hidden),
        streams,
        post_layer_mix.reshape(tokens, HC_MULT).contiguous(),
        comb_res_mix.reshape(tokens, HC_MULT * HC_MULT).contiguous(),
    )
