# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections, of vllm-xpu-kernels 0.1.11 and later."""

import torch

from standins.emulated_xpu.wheel.implementations import implements


def normalized_product(
    streams: torch.Tensor, fn: torch.Tensor, eps: float
) -> torch.Tensor:
    """The product of `fn` with the RMS-normalized streams, `[T, rows of fn]`, fp32."""
    flat = streams.float().flatten(1)
    return flat @ fn.float().T * (flat.square().mean(1, keepdim=True) + eps).rsqrt()


def doubly_stochastic(logits: torch.Tensor, eps: float, rounds: int) -> torch.Tensor:
    """Sinkhorn normalization of `[T, n, n]`: rows by softmax, then columns and rows in
    turn."""
    comb = logits.softmax(-1) + eps
    for step in range(2 * rounds - 1):
        comb = comb / (comb.sum(1 + step % 2, keepdim=True) + eps)
    return comb


@implements("_xpu_C::mhc_pre")
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(post `[..., n, 1]`, comb `[..., n, n]`, both fp32, layer input `[..., H]`) of
    `residual`, `[..., n, H]`."""
    outer, (n, hidden) = residual.shape[:-2], residual.shape[-2:]
    streams = residual.reshape(-1, n, hidden)
    mixes = normalized_product(streams, fn, rms_eps)
    gates = hc_scale.float().split(1)
    scale = torch.cat([s.expand(k) for s, k in zip(gates, (n, n, n * n), strict=True)])
    pre, post, comb = (mixes * scale + hc_base.float()).split([n, n, n * n], dim=1)
    gate = pre.sigmoid() + hc_pre_eps
    mixed = (gate[..., None] * streams.float()).sum(1).to(residual.dtype)
    square = doubly_stochastic(comb.view(-1, n, n), hc_sinkhorn_eps, sinkhorn_repeat)
    return (
        (post.sigmoid() * hc_post_mult_value).view(*outer, n, 1),
        square.view(*outer, n, n),
        mixed.view(*outer, hidden),
    )


@implements("_xpu_C::mhc_post")
def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    """Stream j of the result is `post_j x + sum_i comb_ij residual_i`."""
    mixed = comb_res_mix.float().transpose(-1, -2) @ residual.float()
    gate = post_layer_mix.float().view(*residual.shape[:-1], 1)
    return (mixed + gate * x.float()[..., None, :]).to(residual.dtype)


@implements("_xpu_C::mhc_fused_post_pre")
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mhc_post`, then `mhc_pre` of its result; returns both, in this order."""
    streams = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    eps = (rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    weights = (fn, hc_scale, hc_base)
    gates = mhc_pre(streams, *weights, *eps, hc_post_mult_value, sinkhorn_repeat)
    return streams, *gates


@implements("_xpu_C::hc_head_fused")
def hc_head_fused(
    hs_flat: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    out: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
) -> None:
    """Write the gated sum of the streams, `[T, H]`, into `out`."""
    mixes = normalized_product(hs_flat, fn, rms_eps)
    gate = (mixes * hc_scale.float() + hc_base.float()).sigmoid() + hc_eps
    out.copy_((gate[..., None] * hs_flat.float()).sum(1))
