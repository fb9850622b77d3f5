# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows in MXFP8 for a product with MXFP8 weights, made in one launch.

A row is e4m3 codes with a UE8M0 byte for each 32 of them. The bytes are those that the
product reads, so none is converted; and rows of several matrices beside each other, as
a batched product gives them, need no copy before. RMS norms may come first.
"""

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_once,
    check_same_device,
    check_shape,
    fail,
)
from .._launch import cdiv, launch_options, next_power_of_2
from .._pairs import round_to_bf16
from .._triton import tl, triton
from .._ue8m0 import e4m3_code, e4m3_exponent, exponent_inverse

GROUP = 32
"""Values per scale."""
MIN_AMAX = 1e-10
"""Least absolute maximum assumed of a group."""


@triton.jit
def store_groups(
    x,  # [GROUPS, 32] fp32
    codes_ptr,
    scales_ptr,
    first,
    group_offs,  # [GROUPS]
    group_mask,  # [GROUPS]
    GROUP: tl.constexpr = GROUP,
    MIN_AMAX: tl.constexpr = MIN_AMAX,
):
    """Quantize groups of a row and store them; `first` is the row's first group."""
    amax = tl.max(tl.abs(x), axis=1)  # [GROUPS]
    exponents = e4m3_exponent(tl.maximum(amax, MIN_AMAX))  # [GROUPS]
    codes = e4m3_code(x * exponent_inverse(exponents)[:, None])  # [GROUPS, 32]
    offs = first + group_offs  # [GROUPS]
    code_ptrs = codes_ptr + offs[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(code_ptrs, codes.to(tl.uint8), mask=group_mask[:, None])
    tl.store(scales_ptr + offs, exponents.to(tl.uint8), mask=group_mask)


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    groups,
    matrix_groups,
    token_stride,
    matrix_stride,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr = GROUP,
):
    """A program has BLOCK_G groups of a token."""
    token = tl.program_id(0).to(tl.int64)
    group_offs = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)  # [BLOCK_G]
    group_mask = group_offs < groups  # [BLOCK_G]
    matrices = (group_offs // matrix_groups).to(tl.int64)  # [BLOCK_G]
    # [BLOCK_G]
    in_matrix = group_offs - (matrices * matrix_groups).to(tl.int32)
    # [BLOCK_G]
    row_ptrs = x_ptr + token * token_stride + matrices * matrix_stride
    # [BLOCK_G, 32]
    value_ptrs = row_ptrs[:, None] + (
        in_matrix[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    )
    x = tl.load(value_ptrs, mask=group_mask[:, None], other=0.0)  # [BLOCK_G, 32]
    store_groups(
        x.to(tl.float32), codes_ptr, scales_ptr, token * groups, group_offs, group_mask
    )


@triton.jit
def _normed_groups(
    row_ptr,
    weight_ptr,
    groups,
    eps,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr = GROUP,
):
    """A row by its RMS norm, rounded to bf16, [BLOCK_G, 32] fp32."""
    group_offs = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    # [BLOCK_G, 32]
    offs = group_offs[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = group_offs[:, None] < groups  # [BLOCK_G, 1]
    x = tl.load(row_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_G, 32]
    # [BLOCK_G, 32]
    weights = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / (1.0 * groups * GROUP)
    return round_to_bf16(x * tl.rsqrt(mean + eps) * weights)


@triton.jit
def _q_kv_norm_kernel(
    q_ptr,
    kv_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    codes_ptr,
    scales_ptr,
    kv_out_ptr,
    q_groups,
    kv_groups,
    q_stride,
    kv_stride,
    eps,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    GROUP: tl.constexpr = GROUP,
):
    """A token's query latent, in the first of its programs, and its key in the
    second."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        q_offs = tl.arange(0, Q_BLOCK)  # [Q_BLOCK]
        # [Q_BLOCK, 32]
        q = _normed_groups(
            q_ptr + token * q_stride, q_weight_ptr, q_groups, eps, Q_BLOCK
        )
        store_groups(
            q, codes_ptr, scales_ptr, token * q_groups, q_offs, q_offs < q_groups
        )
    else:
        kv_offs = tl.arange(0, KV_BLOCK)  # [KV_BLOCK]
        # [KV_BLOCK, 32]
        kv = _normed_groups(
            kv_ptr + token * kv_stride, kv_weight_ptr, kv_groups, eps, KV_BLOCK
        )
        # [KV_BLOCK, 32]
        out_offs = kv_offs[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(
            kv_out_ptr + token * kv_groups * GROUP + out_offs,
            kv.to(tl.bfloat16),
            mask=kv_offs[:, None] < kv_groups,
        )


def mxfp8_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to MXFP8.

    A group's scale is the least power of two that keeps its values within 448, of
    magnitudes of 1e-10 at least; rounding is to nearest, ties to even.

    Args:
        x (torch.Tensor):
            Rows of shape `[T, K]`, or `[T, G, K / G]` for rows that lie in G matrices,
            bf16. The last dimension is contiguous, and a multiple of 32.

    Returns:
        (codes, scales): `[T, K]`, float8_e4m3fn, and `[T, K / 32]`, float8_e8m0fnu.

    """
    check_once(_check_rows, x)
    tokens, matrices = x.shape[0], x.shape[1] if x.dim() == 3 else 1
    groups = matrices * x.shape[-1] // GROUP
    codes, scales = _outputs(x, tokens, groups)
    if tokens and groups:
        block_g = 32
        _quantize_kernel[(tokens, cdiv(groups, block_g))](
            x,
            codes,
            scales,
            groups,
            x.shape[-1] // GROUP,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            BLOCK_G=block_g,
            **launch_options(x.device, num_warps=4),
        )
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


def q_kv_norm_mxfp8(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the RMS norms of query latents and keys, and quantize the former.

    Norms are rounded to bf16 before; `mxfp8_quantize` says how codes are made.

    Args:
        q (torch.Tensor):
            Latents of shape `[T, K]`, bf16, with K a multiple of 32; rows may be
            strided.
        kv (torch.Tensor):
            Keys of shape `[T, D]`, bf16, with D a multiple of 32; rows may be strided.
        q_weight (torch.Tensor):
            Of shape `[K]`, bf16 or fp32.
        kv_weight (torch.Tensor):
            Of shape `[D]`, bf16 or fp32.
        eps (float):
            Added to the mean square of a row.

    Returns:
        (codes, scales, kv): codes and scales of the latents, `[T, K]` and
        `[T, K / 32]`, and normed keys, `[T, D]`, bf16.

    """
    check_once(_check_norms, q, kv, q_weight, kv_weight)
    tokens, groups, kv_groups = len(q), q.shape[1] // GROUP, kv.shape[1] // GROUP
    codes, scales = _outputs(q, tokens, groups)
    normed = torch.empty(kv.shape, dtype=torch.bfloat16, device=kv.device)
    if tokens:
        _q_kv_norm_kernel[(tokens, 2)](
            q,
            kv,
            q_weight,
            kv_weight,
            codes,
            scales,
            normed,
            groups,
            kv_groups,
            q.stride(0),
            kv.stride(0),
            eps,
            Q_BLOCK=next_power_of_2(groups),
            KV_BLOCK=next_power_of_2(kv_groups),
            **launch_options(q.device, num_warps=4),
        )
    codes, scales = codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
    return codes, scales, normed


def _outputs(
    x: torch.Tensor, tokens: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as bytes, which Triton can bind."""
    codes = torch.empty((tokens, groups * GROUP), dtype=torch.uint8, device=x.device)
    scales = torch.empty((tokens, groups), dtype=torch.uint8, device=x.device)
    return codes, scales


def _check_rows(x: torch.Tensor) -> None:
    """Raise unless `mxfp8_quantize` takes `x`."""
    if x.dim() not in (2, 3):
        fail("x.shape", list(x.shape), "[T, K] or [T, G, K / G]")
    _check_groups("x", x)


def _check_groups(name: str, x: torch.Tensor) -> None:
    """Raise unless rows of `x` are bf16 in whole groups."""
    check_dtype(name, x, torch.bfloat16)
    check_inner_contiguous(name, x)
    if x.shape[-1] % GROUP:
        fail(f"{name}.shape", list(x.shape), f"a last size of a multiple of {GROUP}")


def _check_norms(
    q: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor
) -> None:
    """Raise unless the arguments of `q_kv_norm_mxfp8` fit together."""
    check_shape("q", q, None, None)
    check_shape("kv", kv, q.shape[0], None)
    for name, x, weight in (("q", q, q_weight), ("kv", kv, kv_weight)):
        _check_groups(name, x)
        check_dtype(f"{name}_weight", weight, torch.bfloat16, torch.float32)
        check_shape(f"{name}_weight", weight, x.shape[1])
        check_inner_contiguous(f"{name}_weight", weight)
    check_same_device(q=q, kv=kv, q_weight=q_weight, kv_weight=kv_weight)
