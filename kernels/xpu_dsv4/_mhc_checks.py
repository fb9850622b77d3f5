# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that the hyper-connections' functions share."""

import torch

from ._checks import check_dtype, check_inner_contiguous, check_shape, fail
from ._mhc_kernels import HC_MULT


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
    hidden: int,
) -> None:
    """Raise unless the projection, the scales and the biases are fp32 and fit."""
    check_shape("fn", fn, gates, HC_MULT * hidden)
    check_shape("hc_scale", hc_scale, scales)
    check_shape("hc_base", hc_base, gates)
    for name, tensor in (("fn", fn), ("hc_scale", hc_scale), ("hc_base", hc_base)):
        check_dtype(name, tensor, torch.float32)
        check_inner_contiguous(name, tensor)
