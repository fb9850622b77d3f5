# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kernels of the hyper-connections; `mhc.py` says what they compute.

The projection is split over the hidden dimension, which a few tokens need to fill a
device: `project_kernel` leaves partial products and partial sums of squares (and,
fused, applies the previous sublayer's mixing first), `finish_kernel` does the rest.
"""

import torch

from ._launch import launch_options
from ._triton import tl, triton


@triton.jit
def project_kernel(
    x_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    residual_out_ptr,
    partial_ptr,
    num_tokens,
    hidden,
    x_stride,
    residual_stride_token,
    residual_stride_stream,
    fn_stride,
    GATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FUSE_POST: tl.constexpr,
):
    """Partial products of one chunk of the hidden dimension, all four streams.

    The streams are exact in bf16; an fp32 weight enters as two bf16 columns, its
    rounded value and the rest. Column GATES of the result holds the sum of squares.
    """
    split = tl.program_id(1)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    real = token < num_tokens
    part = tl.arange(0, 2 * COLUMNS)
    gate = part // 2
    gates = tl.zeros((TOKENS, 2 * COLUMNS), tl.float32)
    squares = tl.zeros((TOKENS, BLOCK), tl.float32)
    for step in range(0, CHUNK // BLOCK * 4):
        j = step % 4
        h = split * CHUNK + step // 4 * BLOCK + tl.arange(0, BLOCK)
        inside = h < hidden
        mask = real[:, None] & inside[None, :]
        rows = residual_ptr + token[:, None] * residual_stride_token + h[None, :]
        if FUSE_POST:
            x = tl.load(x_ptr + token[:, None] * x_stride + h[None, :], mask, 0.0)
            spread = tl.load(post_ptr + token * 4 + j, mask=real, other=0.0)
            mixed = x.to(tl.float32) * spread[:, None]
            for i in tl.static_range(4):
                old = tl.load(rows + i * residual_stride_stream, mask, 0.0)
                share = tl.load(comb_ptr + token * 16 + i * 4 + j, mask=real, other=0.0)
                mixed += old.to(tl.float32) * share[:, None]
            stream = mixed.to(tl.bfloat16)
            out = (token[:, None] * 4 + j) * hidden + h[None, :]
            tl.store(residual_out_ptr + out, stream, mask=mask)
        else:
            stream = tl.load(rows + j * residual_stride_stream, mask, 0.0)
        weights = tl.load(
            fn_ptr + gate[None, :] * fn_stride + j * hidden + h[:, None],
            mask=(gate[None, :] < GATES) & inside[:, None],
            other=0.0,
        )  # [BLOCK, 2 * COLUMNS]
        rest = weights - weights.to(tl.bfloat16).to(tl.float32)
        weights = tl.where((part % 2 == 0)[None, :], weights, rest)
        gates = tl.dot(stream, weights.to(tl.bfloat16), gates)
        wide = stream.to(tl.float32)
        squares += wide * wide
    both = tl.sum(tl.reshape(gates, (TOKENS, COLUMNS, 2)), axis=2)
    column = tl.arange(0, COLUMNS)
    total = tl.sum(squares, axis=1)[:, None]
    both = tl.where(column[None, :] == GATES, total, both)
    cell = (split.to(tl.int64) * num_tokens + token[:, None]) * COLUMNS
    tl.store(partial_ptr + cell + column[None, :], both, mask=real[:, None])


@triton.jit
def finish_kernel(
    residual_ptr,
    partial_ptr,
    scale_ptr,
    base_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    num_tokens,
    hidden,
    splits,
    residual_stride_token,
    residual_stride_stream,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    rounds,
    GATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIX: tl.constexpr,
):
    """The sublayer's input, a block of the hidden dimension a program.

    With MIX, the last program of a token computes the output and stream mixes instead.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, COLUMNS)
    rows = partial_ptr + (split.to(tl.int64) * num_tokens + token) * COLUMNS
    some = split[:, None] < splits
    rms = tl.load(rows + GATES, mask=split < splits, other=0.0)
    rms = tl.rsqrt(tl.sum(rms, axis=0) / (4.0 * hidden) + rms_eps)
    if (tile * BLOCK < hidden) or (not MIX):
        parts = tl.load(rows[:, None] + column[None, :], mask=some, other=0.0)
        gates = tl.sum(parts, axis=0)  # [COLUMNS]
        base = tl.load(base_ptr + column, mask=column < 4, other=0.0)
        pre = tl.sigmoid(gates * rms * tl.load(scale_ptr) + base) + pre_eps
        h = tile * BLOCK + tl.arange(0, BLOCK)
        inside = h < hidden
        mixed = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(4):
            weight = tl.sum(tl.where(column == i, pre, 0.0), axis=0)
            stream = tl.load(
                residual_ptr
                + token * residual_stride_token
                + i * residual_stride_stream
                + h,
                mask=inside,
                other=0.0,
            )
            mixed += stream.to(tl.float32) * weight
        tl.store(out_ptr + token * hidden + h, mixed.to(tl.bfloat16), mask=inside)
    else:
        four = tl.arange(0, 4)
        cell = tl.arange(0, 16)
        heads = tl.load(rows[:, None] + 4 + four[None, :], mask=some, other=0.0)
        post = tl.sum(heads, axis=0) * rms * tl.load(scale_ptr + 1)
        post = tl.sigmoid(post + tl.load(base_ptr + 4 + four)) * post_mult
        tl.store(post_ptr + token * 4 + four, post)

        cells = tl.load(rows[:, None] + 8 + cell[None, :], mask=some, other=0.0)
        logits = tl.sum(cells, axis=0) * rms * tl.load(scale_ptr + 2)
        comb = tl.reshape(logits + tl.load(base_ptr + 8 + cell), (4, 4))
        comb = tl.exp(comb - tl.max(comb, axis=1)[:, None])
        comb = comb / tl.sum(comb, axis=1)[:, None] + sinkhorn_eps
        comb = comb / (tl.sum(comb, axis=0)[None, :] + sinkhorn_eps)
        for _ in range(1, rounds):
            comb = comb / (tl.sum(comb, axis=1)[:, None] + sinkhorn_eps)
            comb = comb / (tl.sum(comb, axis=0)[None, :] + sinkhorn_eps)
        square = four[:, None] * 4 + four[None, :]
        tl.store(comb_ptr + token * 16 + square, comb)


@triton.jit
def post_kernel(
    x_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    hidden,
    x_stride,
    residual_stride_token,
    residual_stride_stream,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < hidden
    j = tl.arange(0, 4)[:, None]
    x = tl.load(x_ptr + token * x_stride + h, mask=inside, other=0.0).to(tl.float32)
    mixed = x[None, :] * tl.load(post_ptr + token * 4 + j)  # [4, BLOCK]
    for i in tl.static_range(4):
        stream = tl.load(
            residual_ptr
            + token * residual_stride_token
            + i * residual_stride_stream
            + h,
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        mixed += stream[None, :] * tl.load(comb_ptr + token * 16 + i * 4 + j)
    out = out_ptr + (token * 4 + j) * hidden + h[None, :]
    tl.store(out, mixed.to(tl.bfloat16), mask=inside[None, :] & (j < 4))


@triton.jit
def norm_kernel(x_ptr, weight_ptr, hidden, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < hidden
    x = tl.load(x_ptr + token * hidden + h, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps) * weight
    tl.store(x_ptr + token * hidden + h, x.to(tl.bfloat16), mask=inside)


def project(
    residual: torch.Tensor,
    fn: torch.Tensor,
    mix: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial gates `[splits, T, columns]` and the streams that they were taken from.

    `mix` is (x, post, comb) of the previous sublayer, applied first.
    """
    tokens, _, hidden = residual.shape
    gates = fn.shape[0]
    columns = 32
    block, chunk = 64, (64 if tokens <= 64 else 512)
    rows, warps = (16, 4) if tokens <= 512 else (32, 8)
    splits = triton.cdiv(hidden, chunk)
    device = residual.device
    partial = torch.empty((splits, tokens, columns), dtype=torch.float32, device=device)
    x, post, comb = (residual, fn, fn) if mix is None else mix
    out = residual if mix is None else torch.empty_like(residual.contiguous())
    if tokens:
        project_kernel[(triton.cdiv(tokens, rows), splits)](
            x,
            residual,
            post,
            comb,
            fn,
            out,
            partial,
            tokens,
            hidden,
            x.stride(0),
            residual.stride(0),
            residual.stride(1),
            fn.stride(0),
            GATES=gates,
            COLUMNS=columns,
            TOKENS=rows,
            BLOCK=block,
            CHUNK=chunk,
            FUSE_POST=mix is not None,
            **launch_options(device, num_warps=warps),
        )
    return partial, out


def finish(
    residual: torch.Tensor,
    partial: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    pre_eps: float,
    mix: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinkhorn: tuple[float, float, int] = (0.0, 0.0, 1),
) -> torch.Tensor:
    """The sublayer's input `[T, hidden]`; fills `mix` = (post, comb) if given.

    `sinkhorn` is (epsilon, post multiplier, rounds).
    """
    tokens, _, hidden = residual.shape
    splits, _, columns = partial.shape
    out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=residual.device)
    if tokens:
        block = 512 if tokens <= 64 else 1024
        tiles = triton.cdiv(hidden, block)
        post, comb = (out, out) if mix is None else mix
        finish_kernel[(tokens, tiles + (mix is not None))](
            residual,
            partial,
            hc_scale,
            hc_base,
            post,
            comb,
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
            SPLITS=triton.next_power_of_2(splits),
            BLOCK=block,
            MIX=mix is not None,
            **launch_options(residual.device, num_warps=4),
        )
    return out
