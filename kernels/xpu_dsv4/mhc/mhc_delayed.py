# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hyper-connections with delayed gates, as DeepSeek-V4.1 has them.

`mhc` describes the streams and their gates. Here a sublayer's input is summed up by the
`pre` gates of the sublayer before it, and its own go to the next one. So the input does
not wait for the projection, and its RMS norm fits into the launch that sums it up.
"""

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
)
from .._launch import launch_options, next_power_of_2
from .._pairs import round_to_bf16
from .._triton import tl, triton
from ._mhc_checks import (
    NUM_GATES,
    check_gates,
    check_norm,
    check_post,
    check_repeats,
    check_streams,
)
from ._mhc_kernels import HC_MULT, inverse_rms, normalized, store_mixes
from ._mhc_launch import project


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def delayed_kernel(
    residual_ptr,
    partial_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    weight_ptr,
    post_ptr,
    comb_ptr,
    next_ptr,
    out_ptr,
    num_tokens,
    hidden,
    num_splits,
    residual_token_stride,
    residual_stream_stride,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    rounds,
    norm_eps,
    GATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_PRE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HC_MULT: tl.constexpr = HC_MULT,
):
    """A token's input, in the first of its programs, and its mixes in the second.

    The mixes follow from partials over STREAMS streams. Without HAS_PRE the input is
    stream 0.
    """
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        dim_offs = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        dim_mask = dim_offs < hidden  # [BLOCK_D]
        # [BLOCK_D]
        stream_ptrs = residual_ptr + token * residual_token_stride + dim_offs
        # [BLOCK_D]
        mixed = tl.load(stream_ptrs, mask=dim_mask, other=0.0).to(tl.float32)
        if HAS_PRE:
            mixed *= tl.load(pre_ptr + token * HC_MULT)
            for i in tl.static_range(1, HC_MULT):
                # [BLOCK_D]
                stream = tl.load(
                    stream_ptrs + i * residual_stream_stride, mask=dim_mask, other=0.0
                )
                mixed += stream.to(tl.float32) * tl.load(pre_ptr + token * HC_MULT + i)
        if HAS_NORM:
            # [BLOCK_D]
            weights = tl.load(weight_ptr + dim_offs, mask=dim_mask, other=0.0)
            mixed = normalized(
                round_to_bf16(mixed), weights.to(tl.float32), hidden, norm_eps
            )
        tl.store(
            out_ptr + token * hidden + dim_offs, mixed.to(tl.bfloat16), mask=dim_mask
        )
    else:
        split_offs = tl.arange(0, BLOCK_S)  # [BLOCK_S]
        split_mask = split_offs < num_splits  # [BLOCK_S]
        # [BLOCK_S]
        row_ptrs = (
            partial_ptr + (split_offs.to(tl.int64) * num_tokens + token) * COLUMNS
        )
        rms = inverse_rms(row_ptrs, split_mask, hidden, rms_eps, GATES, STREAMS)
        stream_offs = tl.arange(0, HC_MULT)  # [HC_MULT]
        # [BLOCK_S, HC_MULT]
        parts = tl.load(
            row_ptrs[:, None] + stream_offs[None, :],
            mask=split_mask[:, None],
            other=0.0,
        )
        gates = tl.sum(parts, axis=0) * rms * tl.load(scale_ptr)  # [HC_MULT]
        pre = tl.sigmoid(gates + tl.load(base_ptr + stream_offs)) + pre_eps  # [HC_MULT]
        tl.store(next_ptr + token * HC_MULT + stream_offs, pre)
        store_mixes(
            row_ptrs,
            split_mask,
            scale_ptr,
            base_ptr,
            post_ptr,
            comb_ptr,
            token,
            rms,
            sinkhorn_eps,
            post_mult,
            rounds,
        )


def _finish(
    streams: torch.Tensor,
    partial: torch.Tensor,
    projected: int,
    gates: tuple[torch.Tensor, torch.Tensor],
    pre_mix: torch.Tensor | None,
    epsilons: tuple[float, float],
    sinkhorn: tuple[float, float, int],
    norm: tuple[torch.Tensor | None, float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(post, comb, layer_input, next_pre_mix) from partials over `projected` streams,
    `gates` (scale, base) and `epsilons` (rms, pre). One launch."""
    tokens, _, hidden = streams.shape
    device = streams.device
    splits, _, columns = partial.shape
    weight, norm_eps = norm
    post = torch.empty((tokens, HC_MULT, 1), dtype=torch.float32, device=device)
    comb = torch.empty((tokens, HC_MULT, HC_MULT), dtype=torch.float32, device=device)
    next_pre_mix = torch.empty((tokens, HC_MULT), dtype=torch.float32, device=device)
    out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=device)
    if tokens:
        delayed_kernel[(tokens, 2)](
            streams,
            partial,
            *gates,
            post if pre_mix is None else pre_mix,
            out if weight is None else weight,
            post,
            comb,
            next_pre_mix,
            out,
            tokens,
            hidden,
            splits,
            streams.stride(0),
            streams.stride(1),
            *epsilons,
            *sinkhorn,
            norm_eps,
            GATES=NUM_GATES,
            COLUMNS=columns,
            STREAMS=projected,
            BLOCK_S=next_power_of_2(splits),
            BLOCK_D=next_power_of_2(hidden),
            HAS_PRE=pre_mix is not None,
            HAS_NORM=weight is not None,
            **launch_options(device, num_warps=16),
        )
    return post, comb, out, next_pre_mix


def _check_delayed(
    streams: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    projected: int,
    sinkhorn_repeat: int,
    pre_mix: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> None:
    tokens, _, hidden = streams.shape
    check_gates(fn, hc_scale, hc_base, NUM_GATES, 3, projected * hidden)
    check_repeats(sinkhorn_repeat)
    if pre_mix is not None:
        check_dtype("pre_mix", pre_mix, torch.float32)
        check_shape("pre_mix", pre_mix, tokens, HC_MULT)
    if norm_weight is not None:
        check_norm(norm_weight, hidden)
    check_same_device(
        residual=streams,
        fn=fn,
        hc_scale=hc_scale,
        hc_base=hc_base,
        pre_mix=pre_mix,
        norm_weight=norm_weight,
    )


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
    """Gates of a sublayer, and its input by the gates before. Two launches.

    Gates are those of `mhc.mhc_pre`; layer_input = sum_i pre_mix_i residual_i.

    Args:
        residual (torch.Tensor):
            Streams of shape `[T, 4, hidden]`, bf16.
        fn (torch.Tensor):
            Projection of shape `[24, 4 * hidden]`, or `[24, hidden]` with `x`, fp32.
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
        pre_mix (torch.Tensor | None):
            Pre gates of the sublayer before, of shape `[T, 4]`, fp32. None, at the
            model's entry, takes stream 0.
        x (torch.Tensor | None):
            What is projected instead of the streams, of shape `[T, hidden]`, bf16: the
            embedding, of which each stream is a copy at the model's entry.
        norm_weight (torch.Tensor | None):
            RMS-normalizes the input with this weight, of shape `[hidden]`.
        norm_eps (float):
            Added to the input's mean square.

    Returns:
        (post, comb, layer_input, next_pre_mix): `[T, 4, 1]`, `[T, 4, 4]` fp32,
        `[T, hidden]` bf16 and `[T, 4]` fp32.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    streams = check_streams("residual", residual)
    source = streams
    if x is not None:
        check_dtype("x", x, torch.bfloat16)
        check_shape("x", x, streams.shape[0], streams.shape[2])
        check_inner_contiguous("x", x)
        check_same_device(residual=residual, x=x)
        source = x.unsqueeze(1)
    projected = source.shape[1]
    _check_delayed(
        streams,
        fn,
        hc_scale,
        hc_base,
        projected,
        sinkhorn_repeat,
        pre_mix,
        norm_weight,
    )
    partial, _ = project(source, fn)
    return _finish(
        streams,
        partial,
        projected,
        (hc_scale, hc_base),
        None if pre_mix is None else pre_mix.contiguous(),
        (rms_eps, hc_pre_eps),
        (hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat),
        (norm_weight, norm_eps),
    )


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
    """`mhc.mhc_post` and the next sublayer's `mhc_pre_delayed`. Two launches.

    Args:
        x (torch.Tensor):
            Output of the previous sublayer, of shape `[T, hidden]`, bf16.
        residual (torch.Tensor):
            Streams of shape `[T, 4, hidden]`, bf16.
        post_layer_mix (torch.Tensor):
            Post gates of shape `[T, 4, 1]` or `[T, 4]`, fp32.
        comb_res_mix (torch.Tensor):
            Comb gates of shape `[T, 4, 4]`, fp32.
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
        pre_mix (torch.Tensor | None):
            Pre gates of the sublayer before, of shape `[T, 4]`, fp32; None takes
            stream 0.
        norm_weight (torch.Tensor | None):
            RMS-normalizes the input with this weight, of shape `[hidden]`.
        norm_eps (float):
            Added to the input's mean square.

    Returns:
        (residual, post, comb, layer_input, next_pre_mix): the new streams, rounded to
        bf16, then what `mhc_pre_delayed` gives for them.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    flat, streams, post, comb = check_post(x, residual, post_layer_mix, comb_res_mix)
    _check_delayed(
        streams, fn, hc_scale, hc_base, HC_MULT, sinkhorn_repeat, pre_mix, norm_weight
    )
    partial, mixed = project(streams, fn, (flat, post, comb))
    rest = _finish(
        mixed,
        partial,
        HC_MULT,
        (hc_scale, hc_base),
        None if pre_mix is None else pre_mix.contiguous(),
        (rms_eps, hc_pre_eps),
        (hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat),
        (norm_weight, norm_eps),
    )
    return mixed, *rest
