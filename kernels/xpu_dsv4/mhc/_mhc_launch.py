# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches of the hyper-connections' kernels, on arguments that `mhc` has checked."""

import torch

from .._launch import cdiv, launch_options, next_power_of_2
from ._mhc_kernels import (
    HC_MULT,
    finish_kernel,
    norm_kernel,
    post_kernel,
    project_kernel,
)

PROJECT_COLUMNS = 32
"""Columns of the partials: up to 24 gates, the sum of squares, and padding."""


def project(
    residual: torch.Tensor,
    fn: torch.Tensor,
    mix: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project the residual streams onto the gates. One launch.

    Args:
        residual (torch.Tensor):
            Streams of shape `[T, streams, hidden]`, bf16; 4 streams with `mix`.
        fn (torch.Tensor):
            Projection of shape `[gates, streams * hidden]`, fp32.
        mix (tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None):
            (x, post, comb) of the previous sublayer, to apply to the streams first.

    Returns:
        (partial, streams): partials of shape `[splits, T, 32]`, fp32, and the streams
        that they were taken from: new ones with `mix`, else `residual`.

    """
    tokens, hc_mult, hidden = residual.shape
    # Few tokens need many splits for programs enough; many need few, whose partials
    # are less to write and to read.
    block_d, split_dim = 64, (64 if tokens <= 64 else 128 if tokens <= 512 else 512)
    block_t, num_warps = (16, 4) if tokens <= 512 else (32, 8)
    splits = cdiv(hidden, split_dim)
    device = residual.device
    partial = torch.empty(
        (splits, tokens, PROJECT_COLUMNS), dtype=torch.float32, device=device
    )
    x, post, comb = (residual, fn, fn) if mix is None else mix
    streams = residual if mix is None else torch.empty_like(residual.contiguous())
    if tokens:
        project_kernel[(cdiv(tokens, block_t), splits)](
            x,
            residual,
            post,
            comb,
            fn,
            streams,
            partial,
            tokens,
            hidden,
            x.stride(0),
            residual.stride(0),
            residual.stride(1),
            fn.stride(0),
            GATES=fn.shape[0],
            COLUMNS=PROJECT_COLUMNS,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            SPLIT_DIM=split_dim,
            FUSE_POST=mix is not None,
            HC_MULT=hc_mult,
            **launch_options(device, num_warps=num_warps),
        )
    return partial, streams


def finish(
    residual: torch.Tensor,
    partial: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    pre_eps: float,
    mix: tuple[torch.Tensor, torch.Tensor],
    sinkhorn: tuple[float, float, int],
) -> torch.Tensor:
    """Compute a sublayer's input and its mixes from the partials. One launch.

    Args:
        residual (torch.Tensor):
            Streams of shape `[T, 4, hidden]`, bf16.
        partial (torch.Tensor):
            Partials of `project`.
        hc_scale (torch.Tensor):
            Scale of each kind of gate, fp32.
        hc_base (torch.Tensor):
            Bias of each gate, fp32.
        rms_eps (float):
            Added to the streams' mean square.
        pre_eps (float):
            Added to the pre gates.
        mix (tuple[torch.Tensor, torch.Tensor]):
            (post, comb) to write, fp32 `[T, 4]` and `[T, 4, 4]`.
        sinkhorn (tuple[float, float, int]):
            (epsilon, factor of the post gates, column normalizations).

    Returns:
        The sublayer's input of shape `[T, hidden]`, bf16.

    """
    tokens, _, hidden = residual.shape
    splits, _, columns = partial.shape
    out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=residual.device)
    if tokens:
        block_d = 512 if tokens <= 64 else 1024
        finish_kernel[(tokens, cdiv(hidden, block_d) + 1)](
            residual,
            partial,
            hc_scale,
            hc_base,
            *mix,
            out,
            tokens,
            hidden,
            splits,
            residual.stride(0),
            residual.stride(1),
            rms_eps,
            pre_eps,
            *sinkhorn,
            GATES=hc_base.shape[0],
            COLUMNS=columns,
            BLOCK_S=next_power_of_2(splits),
            BLOCK_D=block_d,
            **launch_options(residual.device, num_warps=4),
        )
    return out


def spread(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Mix the streams and add a sublayer's output to them. One launch.

    Args:
        x (torch.Tensor):
            Output of the sublayer, of shape `[T, hidden]`, bf16.
        residual (torch.Tensor):
            Streams of shape `[T, 4, hidden]`, bf16.
        post (torch.Tensor):
            Post gates of shape `[T, 4]`, fp32, contiguous.
        comb (torch.Tensor):
            Comb gates of shape `[T, 16]`, fp32, contiguous.

    Returns:
        New streams of shape `[T, 4, hidden]`, bf16.

    """
    tokens, _, hidden = residual.shape
    out = torch.empty(
        (tokens, HC_MULT, hidden), dtype=torch.bfloat16, device=residual.device
    )
    if tokens:
        block_d = 512
        post_kernel[(tokens, cdiv(hidden, block_d))](
            x,
            residual,
            post,
            comb,
            out,
            hidden,
            x.stride(0),
            residual.stride(0),
            residual.stride(1),
            BLOCK_D=block_d,
            **launch_options(residual.device, num_warps=4),
        )
    return out


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """RMS-normalize the rows of `x`, `[T, hidden]`, in place. One launch."""
    tokens, hidden = x.shape
    if tokens:
        norm_kernel[(tokens,)](
            x,
            weight,
            hidden,
            eps,
            BLOCK_D=next_power_of_2(hidden),
            **launch_options(x.device, num_warps=16),
        )
