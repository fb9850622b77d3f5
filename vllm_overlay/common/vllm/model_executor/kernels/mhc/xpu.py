# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton hyper-connections on XPU, as custom ops that torch.compile does not enter."""

import torch

from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.ops.xpu_dsv4.mhc import (
    hc_head,
    mhc_fused_post_pre,
    mhc_post,
    mhc_pre,
)


def _mhc_pre_xpu(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return mhc_pre(
        residual,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )


def _mhc_pre_xpu_fake(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *outer, hc_mult, hidden_size = residual.shape
    return (
        residual.new_empty((*outer, hc_mult, 1), dtype=torch.float32),
        residual.new_empty((*outer, hc_mult, hc_mult), dtype=torch.float32),
        residual.new_empty((*outer, hidden_size)),
    )


def _mhc_post_xpu(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    return mhc_post(x, residual, post_layer_mix, comb_res_mix)


def _mhc_post_xpu_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


def _mhc_fused_post_pre_xpu(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return mhc_fused_post_pre(
        x,
        residual,
        post_layer_mix,
        comb_res_mix,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )


def _mhc_fused_post_pre_xpu_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mixed = _mhc_post_xpu_fake(x, residual, post_layer_mix, comb_res_mix)
    gates = _mhc_pre_xpu_fake(
        mixed,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
    )
    return mixed, *gates


def _hc_head_xpu(
    hidden_states: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    return hc_head(hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps)


def _hc_head_xpu_fake(
    hidden_states: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    *outer, _, hidden_size = hidden_states.shape
    return hidden_states.new_empty((*outer, hidden_size))


direct_register_custom_op(
    op_name="mhc_pre_xpu", op_func=_mhc_pre_xpu, fake_impl=_mhc_pre_xpu_fake
)
direct_register_custom_op(
    op_name="mhc_post_xpu", op_func=_mhc_post_xpu, fake_impl=_mhc_post_xpu_fake
)
direct_register_custom_op(
    op_name="mhc_fused_post_pre_xpu",
    op_func=_mhc_fused_post_pre_xpu,
    fake_impl=_mhc_fused_post_pre_xpu_fake,
)
direct_register_custom_op(
    op_name="hc_head_xpu", op_func=_hc_head_xpu, fake_impl=_hc_head_xpu_fake
)
