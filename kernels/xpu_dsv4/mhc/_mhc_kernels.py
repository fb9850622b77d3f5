# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kernels of the hyper-connections; `mhc` has the formulas.

A few tokens alone do not fill a device, so the projection is split over the hidden
dimension: `project_kernel` stores partial products and partial sums of squares, after
it has applied the previous sublayer's mixing where that is fused; `finish_kernel` sums
them up and computes the rest.
"""

from .._pairs import round_to_bf16
from .._triton import tl, triton

HC_MULT = 4
"""Residual streams."""


@triton.jit(do_not_specialize=["num_tokens"])
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
    residual_token_stride,
    residual_stream_stride,
    fn_stride,
    GATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_DIM: tl.constexpr,
    FUSE_POST: tl.constexpr,
    HC_MULT: tl.constexpr = HC_MULT,
):
    """Partial products of SPLIT_DIM hidden dims, over all HC_MULT streams.

    The streams are exact in bf16. An fp32 weight enters as two bf16 columns, its
    rounded value and the rest. Column GATES of the result holds the sum of squares.
    """
    split = tl.program_id(1)
    # [BLOCK_T]
    token_offs = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    token_mask = token_offs < num_tokens  # [BLOCK_T]
    part_offs = tl.arange(0, 2 * COLUMNS)  # [2 * COLUMNS]
    gate_offs = part_offs // 2  # [2 * COLUMNS]
    acc = tl.zeros((BLOCK_T, 2 * COLUMNS), tl.float32)  # [BLOCK_T, 2 * COLUMNS]
    squares = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)  # [BLOCK_T, BLOCK_D]
    for step in range(0, SPLIT_DIM // BLOCK_D * HC_MULT):
        j = step % HC_MULT
        # [BLOCK_D]
        dim_offs = split * SPLIT_DIM + step // HC_MULT * BLOCK_D + tl.arange(0, BLOCK_D)
        dim_mask = dim_offs < hidden  # [BLOCK_D]
        tile_mask = token_mask[:, None] & dim_mask[None, :]  # [BLOCK_T, BLOCK_D]
        # [BLOCK_T, BLOCK_D]
        residual_ptrs = (
            residual_ptr
            + token_offs[:, None] * residual_token_stride
            + dim_offs[None, :]
        )
        if FUSE_POST:
            # [BLOCK_T, BLOCK_D]
            x = tl.load(
                x_ptr + token_offs[:, None] * x_stride + dim_offs[None, :],
                mask=tile_mask,
                other=0.0,
            )
            # [BLOCK_T]
            post = tl.load(
                post_ptr + token_offs * HC_MULT + j, mask=token_mask, other=0.0
            )
            mixed = x.to(tl.float32) * post[:, None]  # [BLOCK_T, BLOCK_D]
            for i in tl.static_range(HC_MULT):
                # [BLOCK_T, BLOCK_D]
                old = tl.load(
                    residual_ptrs + i * residual_stream_stride,
                    mask=tile_mask,
                    other=0.0,
                )
                # [BLOCK_T]
                comb = tl.load(
                    comb_ptr + token_offs * (HC_MULT * HC_MULT) + i * HC_MULT + j,
                    mask=token_mask,
                    other=0.0,
                )
                mixed += old.to(tl.float32) * comb[:, None]
            stream = mixed.to(tl.bfloat16)  # [BLOCK_T, BLOCK_D]
            # [BLOCK_T, BLOCK_D]
            out_offs = (token_offs[:, None] * HC_MULT + j) * hidden + dim_offs[None, :]
            tl.store(residual_out_ptr + out_offs, stream, mask=tile_mask)
        else:
            # [BLOCK_T, BLOCK_D]
            stream = tl.load(
                residual_ptrs + j * residual_stream_stride, mask=tile_mask, other=0.0
            )
        # [BLOCK_D, 2 * COLUMNS]
        weights = tl.load(
            fn_ptr + gate_offs[None, :] * fn_stride + j * hidden + dim_offs[:, None],
            mask=(gate_offs[None, :] < GATES) & dim_mask[:, None],
            other=0.0,
        )
        # [BLOCK_D, 2 * COLUMNS]
        rest = weights - round_to_bf16(weights)
        # [BLOCK_D, 2 * COLUMNS]
        parts = tl.where((part_offs % 2 == 0)[None, :], weights, rest)
        acc = tl.dot(stream, parts.to(tl.bfloat16), acc)
        # By bits: Intel's lowering would drop the rounding, and square other streams
        # than those that are stored.
        bits = stream.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)  # [BLOCK_T, BLOCK_D]
        squares += wide * wide
    gates = tl.sum(tl.reshape(acc, (BLOCK_T, COLUMNS, 2)), axis=2)  # [BLOCK_T, COLUMNS]
    column_offs = tl.arange(0, COLUMNS)  # [COLUMNS]
    square_sum = tl.sum(squares, axis=1)[:, None]  # [BLOCK_T, 1]
    gates = tl.where(column_offs[None, :] == GATES, square_sum, gates)
    # [BLOCK_T, 1]
    row_offs = (split.to(tl.int64) * num_tokens + token_offs[:, None]) * COLUMNS
    tl.store(
        partial_ptr + row_offs + column_offs[None, :], gates, mask=token_mask[:, None]
    )


@triton.jit
def inverse_rms(
    row_ptrs,
    split_mask,
    hidden,
    rms_eps,
    GATES: tl.constexpr,
    HC_MULT: tl.constexpr = HC_MULT,
):
    """One over the root mean square of a token's streams, from its partials.

    `row_ptrs` and `split_mask` are [BLOCK_S].
    """
    # [BLOCK_S]
    squares = tl.load(row_ptrs + GATES, mask=split_mask, other=0.0)
    mean = tl.sum(squares, axis=0) / (1.0 * HC_MULT * hidden)
    return tl.rsqrt(mean + rms_eps)


@triton.jit
def store_input_tile(
    residual_ptr,
    row_ptrs,
    split_mask,
    scale_ptr,
    base_ptr,
    out_ptr,
    token,
    tile,
    hidden,
    residual_token_stride,
    residual_stream_stride,
    rms,
    pre_eps,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HC_MULT: tl.constexpr = HC_MULT,
):
    """Sum up one block of hidden dims of a token's streams by their `pre` gates."""
    column_offs = tl.arange(0, COLUMNS)  # [COLUMNS]
    # [BLOCK_S, COLUMNS]
    parts = tl.load(
        row_ptrs[:, None] + column_offs[None, :], mask=split_mask[:, None], other=0.0
    )
    gates = tl.sum(parts, axis=0)  # [COLUMNS]
    # [COLUMNS]
    base = tl.load(base_ptr + column_offs, mask=column_offs < HC_MULT, other=0.0)
    pre = tl.sigmoid(gates * rms * tl.load(scale_ptr) + base) + pre_eps  # [COLUMNS]
    dim_offs = tile * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    dim_mask = dim_offs < hidden  # [BLOCK_D]
    mixed = tl.zeros((BLOCK_D,), tl.float32)  # [BLOCK_D]
    for i in tl.static_range(HC_MULT):
        weight = tl.sum(tl.where(column_offs == i, pre, 0.0), axis=0)
        # [BLOCK_D]
        stream = tl.load(
            residual_ptr
            + token * residual_token_stride
            + i * residual_stream_stride
            + dim_offs,
            mask=dim_mask,
            other=0.0,
        )
        mixed += stream.to(tl.float32) * weight
    tl.store(out_ptr + token * hidden + dim_offs, mixed.to(tl.bfloat16), mask=dim_mask)


@triton.jit
def store_mixes(
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
    HC_MULT: tl.constexpr = HC_MULT,
):
    """Store a token's output and stream mixes: of its gates, the first 4 are `pre`, the
    next 4 `post` and the last 16 `comb`. `row_ptrs` and `split_mask` are [BLOCK_S].
    """
    POST: tl.constexpr = HC_MULT
    COMB: tl.constexpr = 2 * HC_MULT
    SQUARE: tl.constexpr = HC_MULT * HC_MULT
    stream_offs = tl.arange(0, HC_MULT)  # [HC_MULT]
    pair_offs = tl.arange(0, SQUARE)  # [SQUARE]
    # [BLOCK_S, HC_MULT]
    post_parts = tl.load(
        row_ptrs[:, None] + POST + stream_offs[None, :],
        mask=split_mask[:, None],
        other=0.0,
    )
    # [HC_MULT]
    post_gates = tl.sum(post_parts, axis=0) * rms * tl.load(scale_ptr + 1)
    # [HC_MULT]
    post = tl.sigmoid(post_gates + tl.load(base_ptr + POST + stream_offs)) * post_mult
    tl.store(post_ptr + token * HC_MULT + stream_offs, post)

    # [BLOCK_S, SQUARE]
    comb_parts = tl.load(
        row_ptrs[:, None] + COMB + pair_offs[None, :],
        mask=split_mask[:, None],
        other=0.0,
    )
    logits = tl.sum(comb_parts, axis=0) * rms * tl.load(scale_ptr + 2)  # [SQUARE]
    # [HC_MULT, HC_MULT]
    comb = tl.reshape(logits + tl.load(base_ptr + COMB + pair_offs), (HC_MULT, HC_MULT))
    comb = tl.exp(comb - tl.max(comb, axis=1)[:, None])
    comb = comb / tl.sum(comb, axis=1)[:, None] + sinkhorn_eps
    comb = comb / (tl.sum(comb, axis=0)[None, :] + sinkhorn_eps)
    for _ in range(1, rounds):
        comb = comb / (tl.sum(comb, axis=1)[:, None] + sinkhorn_eps)
        comb = comb / (tl.sum(comb, axis=0)[None, :] + sinkhorn_eps)
    # [HC_MULT, HC_MULT]
    square_offs = stream_offs[:, None] * HC_MULT + stream_offs[None, :]
    tl.store(comb_ptr + token * SQUARE + square_offs, comb)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
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
    num_splits,
    residual_token_stride,
    residual_stream_stride,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    rounds,
    GATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of hidden dims of a sublayer's input.

    The last program of a token computes the output and stream mixes instead.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    split_offs = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    split_mask = split_offs < num_splits  # [BLOCK_S]
    # [BLOCK_S]
    row_ptrs = partial_ptr + (split_offs.to(tl.int64) * num_tokens + token) * COLUMNS
    rms = inverse_rms(row_ptrs, split_mask, hidden, rms_eps, GATES)
    if tile * BLOCK_D < hidden:
        store_input_tile(
            residual_ptr,
            row_ptrs,
            split_mask,
            scale_ptr,
            base_ptr,
            out_ptr,
            token,
            tile,
            hidden,
            residual_token_stride,
            residual_stream_stride,
            rms,
            pre_eps,
            COLUMNS,
            BLOCK_D,
        )
    else:
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


@triton.jit
def post_kernel(
    x_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    hidden,
    x_stride,
    residual_token_stride,
    residual_stream_stride,
    BLOCK_D: tl.constexpr,
    HC_MULT: tl.constexpr = HC_MULT,
):
    """One block of hidden dims of the mixed streams of one token."""
    token = tl.program_id(0).to(tl.int64)
    dim_offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    dim_mask = dim_offs < hidden  # [BLOCK_D]
    stream_offs = tl.arange(0, HC_MULT)[:, None]  # [HC_MULT, 1]
    # [BLOCK_D]
    x = tl.load(x_ptr + token * x_stride + dim_offs, mask=dim_mask, other=0.0).to(
        tl.float32
    )
    # [HC_MULT, BLOCK_D]
    mixed = x[None, :] * tl.load(post_ptr + token * HC_MULT + stream_offs)
    for i in tl.static_range(HC_MULT):
        # [BLOCK_D]
        stream = tl.load(
            residual_ptr
            + token * residual_token_stride
            + i * residual_stream_stride
            + dim_offs,
            mask=dim_mask,
            other=0.0,
        ).to(tl.float32)
        mixed += stream[None, :] * tl.load(
            comb_ptr + token * (HC_MULT * HC_MULT) + i * HC_MULT + stream_offs
        )
    # [HC_MULT, BLOCK_D]
    out_ptrs = out_ptr + (token * HC_MULT + stream_offs) * hidden + dim_offs[None, :]
    out_mask = dim_mask[None, :] & (stream_offs < HC_MULT)  # [HC_MULT, BLOCK_D]
    tl.store(out_ptrs, mixed.to(tl.bfloat16), mask=out_mask)


@triton.jit
def normalized(x, weights, hidden, eps):
    """One RMS-normalized row times its weights; both are fp32, [BLOCK_D]."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps) * weights


@triton.jit
def norm_kernel(x_ptr, weight_ptr, hidden, eps, BLOCK_D: tl.constexpr):
    """RMS-normalize one row of `x` in place."""
    token = tl.program_id(0).to(tl.int64)
    dim_offs = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    dim_mask = dim_offs < hidden  # [BLOCK_D]
    # [BLOCK_D]
    x = tl.load(x_ptr + token * hidden + dim_offs, mask=dim_mask, other=0.0).to(
        tl.float32
    )
    # [BLOCK_D]
    weights = tl.load(weight_ptr + dim_offs, mask=dim_mask, other=0.0).to(tl.float32)
    normed = normalized(x, weights, hidden, eps)  # [BLOCK_D]
    tl.store(x_ptr + token * hidden + dim_offs, normed.to(tl.bfloat16), mask=dim_mask)
