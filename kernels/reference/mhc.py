# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the hyper-connections."""

import torch


def _normalized_product(
    streams: torch.Tensor, fn: torch.Tensor, eps: float
) -> torch.Tensor:
    """fn x / rms(x) over the flattened streams x, `[..., gates]` float64."""
    x = streams.double().flatten(-2)
    return x @ fn.double().T * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.mhc.mhc_pre`; float64 results."""
    product = _normalized_product(residual, fn, rms_eps)
    sizes = (4, 4, 16)
    parts = zip(product.split(sizes, -1), hc_scale, hc_base.split(sizes), strict=True)
    pre, post, comb = (m * scale.double() + base.double() for m, scale, base in parts)
    comb = torch.softmax(comb.unflatten(-1, (4, 4)), dim=-1) + hc_sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    for _ in range(sinkhorn_repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    gate = torch.sigmoid(pre) + hc_pre_eps
    layer_input = (gate.unsqueeze(-1) * residual.double()).sum(-2)
    if norm_weight is not None:
        x = layer_input.to(torch.bfloat16).double()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
        layer_input = x * norm_weight.double()
    post = torch.sigmoid(post) * hc_post_mult_value
    return post.unsqueeze(-1), comb, layer_input


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.mhc.mhc_post`; float64 result."""
    mixed = comb_res_mix.double().transpose(-1, -2) @ residual.double()
    spread = post_layer_mix.double().reshape(*residual.shape[:-1], 1)
    return mixed + spread * x.double().unsqueeze(-2)


def mhc_fused_post_pre(
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
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.mhc.mhc_fused_post_pre`; float64 results."""
    streams = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    gates = mhc_pre(
        streams.to(torch.bfloat16),
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
    return streams, *gates


def hc_head(
    hidden_states: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.mhc.hc_head`; float64 result."""
    product = _normalized_product(hidden_states, hc_fn, rms_norm_eps)
    gate = torch.sigmoid(product * hc_scale.double() + hc_base.double()) + hc_eps
    return (gate.unsqueeze(-1) * hidden_states.double()).sum(-2)
