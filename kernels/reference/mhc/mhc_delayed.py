# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the hyper-connections with delayed gates."""

import torch

from .mhc import collapsed, gates, mhc_post, normalized_product


def mhc_pre_delayed(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.mhc.mhc_delayed.mhc_pre_delayed`; float64 results."""
    source = residual.flatten(-2) if x is None else x
    next_pre_mix, post, comb = gates(
        normalized_product(source, fn, rms_eps),
        hc_scale,
        hc_base,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
    )
    if pre_mix is None:
        pre_mix = torch.zeros_like(next_pre_mix)
        pre_mix[:, 0] = 1
    layer_input = collapsed(residual, pre_mix, norm_weight, norm_eps)
    return post.unsqueeze(-1), comb, layer_input, next_pre_mix


def mhc_fused_post_pre_delayed(
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
    pre_mix: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.mhc.mhc_delayed.mhc_fused_post_pre_delayed`; float64."""
    streams = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    rest = mhc_pre_delayed(
        streams.to(torch.bfloat16),
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        pre_mix,
        None,
        norm_weight,
        norm_eps,
    )
    return streams, *rest
