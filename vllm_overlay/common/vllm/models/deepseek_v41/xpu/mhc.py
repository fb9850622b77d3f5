# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hyper-connections of DeepSeek V4.1 on XPU, with the signatures that the layers of
NVIDIA's model call."""

from typing import Any

import torch

import vllm.model_executor.kernels.mhc.xpu_delayed  # noqa: F401
from vllm.model_executor.layers.fused_moe.moe_output import MoEOutput


def mhc_pre_delayed(
    residual: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.vllm.mhc_pre_delayed_xpu(residual, *args, **kwargs)


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    return torch.ops._xpu_C.mhc_post(x, residual, post_layer_mix, comb_res_mix)


def mhc_shifted_post_pre(
    x: torch.Tensor | MoEOutput,
    *args: Any,
    capture_aux: bool = False,
    stream: None = None,
    reduce_results: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """The mean of the streams comes last, if `capture_aux`. No stream overlaps, and
    no all-reduce is fused here."""
    assert stream is None and not reduce_results
    residual, *outputs = torch.ops.vllm.mhc_fused_post_pre_delayed_xpu(
        x, *args, **kwargs
    )
    aux = residual.mean(dim=1) if capture_aux else residual.new_empty(0)
    return residual, *outputs, aux
