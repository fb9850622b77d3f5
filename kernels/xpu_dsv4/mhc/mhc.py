# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Manifold-constrained hyper-connections: the mixing of the residual streams.

A layer has 4 residual streams. Before a sublayer, 24 gates are projected from the
RMS-normalized streams: 4 `pre` gates sum the streams into the sublayer's input, 4
`post` gates spread its output over them, and 16 `comb` gates mix the streams by a
matrix that Sinkhorn's rounds make doubly stochastic.

Source: mHC: Manifold-Constrained Hyper-Connections, arXiv:2512.24880. Where epsilons
are added, and the order of normalizations, are those of the model's own code.
"""

import torch

from .._checks import check_same_device
from ._mhc_checks import (
    NUM_GATES,
    check_gates,
    check_norm,
    check_post,
    check_repeats,
    check_streams,
)
from ._mhc_kernels import HC_MULT
from ._mhc_launch import finish, normalize, project, spread


def _gates_and_input(
    streams: torch.Tensor,
    partial: torch.Tensor,
    outer: torch.Size,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    pre_eps: float,
    sinkhorn: tuple[float, float, int],
    norm: tuple[torch.Tensor | None, float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(post, comb, layer_input) from the partials of a projection."""
    tokens, _, hidden = streams.shape
    device = streams.device
    weight, eps = norm
    if weight is not None:
        check_norm(weight, hidden)
    post = torch.empty((tokens, HC_MULT), dtype=torch.float32, device=device)
    comb = torch.empty((tokens, HC_MULT, HC_MULT), dtype=torch.float32, device=device)
    layer_input = finish(
        streams, partial, hc_scale, hc_base, rms_eps, pre_eps, (post, comb), sinkhorn
    )
    if weight is not None:
        normalize(layer_input, weight, eps)
    return (
        post.view(*outer, HC_MULT, 1),
        comb.view(*outer, HC_MULT, HC_MULT),
        layer_input.view(*outer, hidden),
    )


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
    """Gates of a sublayer and its input, from the residual streams. Two launches.

    With m = fn x / rms(x) over the flattened streams x:

    - pre = sigmoid(scale_0 m_0..3 + base_0..3) + pre_eps,
    - post = sigmoid(scale_1 m_4..7 + base_4..7) * post_mult,
    - comb = softmax(scale_2 m_8..23 + base_8..23) + sinkhorn_eps by rows, then its
      columns normalized, then `sinkhorn_repeat - 1` times its rows and its columns,
      each divided by its sum plus sinkhorn_eps,
    - layer_input = sum_i pre_i stream_i.

    Args:
        residual (torch.Tensor):
            Streams of shape `[..., 4, hidden]`, bf16.
        fn (torch.Tensor):
            Projection of shape `[24, 4 * hidden]`, fp32.
        hc_scale (torch.Tensor):
            Scales of the pre, post and comb gates, of shape `[3]`, fp32.
        hc_base (torch.Tensor):
            Biases of the gates, of shape `[24]`, fp32.
        rms_eps (float):
            Added to the streams' mean square.
        hc_pre_eps (float):
            Added to the pre gates.
        hc_sinkhorn_eps (float):
            Added to the softmax and to each sum.
        hc_post_mult_value (float):
            Factor of the post gates.
        sinkhorn_repeat (int):
            Column normalizations, at least 1.
        n_splits (int):
            Ignored: the split follows from the shape.
        norm_weight (torch.Tensor | None):
            RMS-normalizes the input with this weight, of shape `[hidden]`; one launch
            more.
        norm_eps (float):
            Added to the input's mean square.

    Returns:
        (post, comb, layer_input): `[..., 4, 1]` fp32, `[..., 4, 4]` fp32 and
        `[..., hidden]` bf16.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    streams = check_streams("residual", residual)
    check_gates(fn, hc_scale, hc_base, NUM_GATES, 3, HC_MULT * streams.shape[2])
    check_repeats(sinkhorn_repeat)
    check_same_device(
        residual=residual,
        fn=fn,
        hc_scale=hc_scale,
        hc_base=hc_base,
        norm_weight=norm_weight,
    )
    partial, _ = project(streams, fn)
    return _gates_and_input(
        streams,
        partial,
        residual.shape[:-2],
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        (hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat),
        (norm_weight, norm_eps),
    )


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    """Spread a sublayer's output over the mixed residual streams. One launch.

    out_j = post_j x + sum_i comb_ij residual_i, in fp32, rounded once.

    Args:
        x (torch.Tensor):
            Output of the sublayer, of shape `[..., hidden]`, bf16.
        residual (torch.Tensor):
            Streams of shape `[..., 4, hidden]`, bf16.
        post_layer_mix (torch.Tensor):
            Post gates of shape `[..., 4, 1]` or `[..., 4]`, fp32.
        comb_res_mix (torch.Tensor):
            Comb gates of shape `[..., 4, 4]`, fp32.

    Returns:
        New streams of `residual`'s shape, bf16.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    flat, streams, post, comb = check_post(x, residual, post_layer_mix, comb_res_mix)
    return spread(flat, streams, post, comb).view(residual.shape)


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
    """`mhc_post` and the next sublayer's `mhc_pre`. Two launches.

    Args:
        x (torch.Tensor):
            Output of the previous sublayer, of shape `[..., hidden]`, bf16.
        residual (torch.Tensor):
            Streams of shape `[..., 4, hidden]`, bf16.
        post_layer_mix (torch.Tensor):
            Post gates of shape `[..., 4, 1]` or `[..., 4]`, fp32.
        comb_res_mix (torch.Tensor):
            Comb gates of shape `[..., 4, 4]`, fp32.
        fn (torch.Tensor):
            Projection of shape `[24, 4 * hidden]`, fp32.
        hc_scale (torch.Tensor):
            Scales of the pre, post and comb gates, of shape `[3]`, fp32.
        hc_base (torch.Tensor):
            Biases of the gates, of shape `[24]`, fp32.
        rms_eps (float):
            Added to the streams' mean square.
        hc_pre_eps (float):
            Added to the pre gates.
        hc_sinkhorn_eps (float):
            Added to the softmax and to each sum.
        hc_post_mult_value (float):
            Factor of the post gates.
        sinkhorn_repeat (int):
            Column normalizations, at least 1.
        n_splits (int):
            Ignored: the split follows from the shape.
        tile_n (int):
            Ignored: the tile follows from the shape.
        norm_weight (torch.Tensor | None):
            RMS-normalizes the input with this weight, of shape `[hidden]`; one launch
            more.
        norm_eps (float):
            Added to the input's mean square.

    Returns:
        (residual, post, comb, layer_input): the new streams, rounded to bf16, then what
        `mhc_pre` gives for them.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    flat, streams, post, comb = check_post(x, residual, post_layer_mix, comb_res_mix)
    check_gates(fn, hc_scale, hc_base, NUM_GATES, 3, HC_MULT * streams.shape[2])
    check_repeats(sinkhorn_repeat)
    check_same_device(
        residual=residual,
        fn=fn,
        hc_scale=hc_scale,
        hc_base=hc_base,
        norm_weight=norm_weight,
    )
    partial, mixed = project(streams, fn, (flat, post, comb))
    gates = _gates_and_input(
        mixed,
        partial,
        residual.shape[:-2],
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        (hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat),
        (norm_weight, norm_eps),
    )
    return mixed.view(residual.shape), *gates
