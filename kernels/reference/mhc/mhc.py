# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the hyper-connections."""

import torch


def normalized_product(x: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """fn x / rms(x) over the rows of x, `[..., gates]` float64."""
    x = x.double()
    return x @ fn.double().T * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gates(
    product: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre, post, comb), `[..., 4]`, `[..., 4]` and `[..., 4, 4]`, of a product."""
    sizes = (4, 4, 16)
    parts = zip(product.split(sizes, -1), hc_scale, hc_base.split(sizes), strict=True)
    pre, post, comb = (m * scale.double() + base.double() for m, scale, base in parts)
    comb = torch.softmax(comb.unflatten(-1, (4, 4)), dim=-1) + hc_sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    for _ in range(sinkhorn_repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    pre = torch.sigmoid(pre) + hc_pre_eps
    return pre, torch.sigmoid(post) * hc_post_mult_value, comb


def collapsed(
    streams: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> torch.Tensor:
    """The streams summed up by `gate`, and normalized where there is a weight."""
    x = (gate.double().unsqueeze(-1) * streams.double()).sum(-2)
    if norm_weight is None:
        return x
    x = x.to(torch.bfloat16).double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
    return x * norm_weight.double()


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
    """See `kernels.xpu_dsv4.mhc.mhc.mhc_pre`; float64 results."""
    product = normalized_product(residual.flatten(-2), fn, rms_eps)
    pre, post, comb = gates(
        product,
        hc_scale,
        hc_base,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
    )
    layer_input = collapsed(residual, pre, norm_weight, norm_eps)
    return post.unsqueeze(-1), comb, layer_input


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.mhc.mhc.mhc_post`; float64 result."""
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
    """See `kernels.xpu_dsv4.mhc.mhc.mhc_fused_post_pre`; float64 results."""
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
    """See `kernels.xpu_dsv4.mhc.mhc.hc_head`; float64 result."""
    product = normalized_product(hidden_states.flatten(-2), hc_fn, rms_norm_eps)
    gate = torch.sigmoid(product * hc_scale.double() + hc_base.double()) + hc_eps
    return (gate.unsqueeze(-1) * hidden_states.double()).sum(-2)
