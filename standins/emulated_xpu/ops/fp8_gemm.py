# SPDX-License-Identifier: Apache-2.0
"""Products with FP8 weights: both operands in FP8, or the weights alone."""

import torch

from standins.emulated_xpu.wheel.formats import expanded
from standins.emulated_xpu.wheel.implementations import implements
from standins.emulated_xpu.wheel.pins import kernels_version

MX_GROUP = 32
BLOCKS_SINCE = (0, 1, 9)
"""From this version on a row has fp32 scales, of the pins also with e8m0 scales of
weights."""


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in kernels_version().split("."))


def _check_blocks(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor
) -> None:
    """Raise unless the kernel takes these operands, where a row of `a` has more than
    one scale."""
    mixed = (a_scale.dtype, b_scale.dtype) == (torch.float32, torch.float8_e8m0fnu)
    if a_scale.dtype != b_scale.dtype and not (mixed and _version() >= BLOCKS_SINCE):
        raise ValueError(
            f"fp8_gemm: scales of {a_scale.dtype} and {b_scale.dtype} do not go"
            " together"
        )
    microscaled = a_scale.dtype == torch.float8_e8m0fnu
    if microscaled:
        expected = [a.shape[1] // MX_GROUP, b.shape[1]]
        if list(b_scale.shape) != expected:
            raise ValueError(
                f"fp8_gemm: MXFP8 wants weight scales {expected}, got"
                f" {list(b_scale.shape)}"
            )
    elif _version() < BLOCKS_SINCE:
        raise NotImplementedError(
            f"fp8_gemm of vllm_xpu_kernels {kernels_version()} has no fp32 block scales"
        )
    if a_scale.shape[1] != b_scale.shape[0]:
        raise ValueError(
            f"fp8_gemm: {a_scale.shape[1]} groups of a row, {b_scale.shape[0]} of a"
            " column"
        )


@implements("_xpu_C::fp8_gemm")
def fp8_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None,
    A_scale_: torch.Tensor | None,
    B_scale_: torch.Tensor | None,
    bias_: torch.Tensor | None,
) -> torch.Tensor:
    """`A @ B` of FP8 values times their scales, summed in fp32, plus the bias.

    Args:
        A: `[M, K]`.
        B: `[K, N]`, row-major or column-major.
        out_dtype: bf16 or fp16; None means bf16.
        A_scale_: one value, `[M, 1]`, or one per group of a row: from 0.1.6 on
            `[M, K / 32]` e8m0, from 0.1.9 on also `[M, K / 128]` fp32.
        B_scale_: one value, `[N]` or `[1, N]`, or with groups `[K / 32, N]` e8m0 and
            `[K / 128, N / 128]` fp32.
        bias_: `[N]`; an empty tensor means none.
    """
    if A_scale_ is None or B_scale_ is None:
        raise NotImplementedError("fp8_gemm without scales")
    if out_dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"fp8_gemm: no output of {out_dtype}")
    if A_scale_.dim() == 2 and A_scale_.shape[1] > 1:
        _check_blocks(A, A_scale_, B, B_scale_)
    values = A.float() * expanded(as_matrix(A_scale_), A.shape)
    product = values @ (B.float() * expanded(as_matrix(B_scale_), B.shape))
    return finish(product, bias_, out_dtype or torch.bfloat16)


@implements("_xpu_C::fp8_gemm_w8a16")
def fp8_gemm_w8a16(
    A: torch.Tensor,
    B: torch.Tensor,
    B_scale_: torch.Tensor | None,
    bias_: torch.Tensor | None,
) -> torch.Tensor:
    """`A @ B` of bf16 or fp16 rows `[..., K]` and FP8 weights `[K, N]`.

    `B_scale_` is one value, or one per column: `[N]`, `[1, N]` or `[N, 1]`.
    """
    if B_scale_ is None:
        raise NotImplementedError("fp8_gemm_w8a16 without scales")
    if B_scale_.numel() not in (1, B.shape[1]):
        raise ValueError(
            f"fp8_gemm_w8a16: {B_scale_.numel()} scales for {B.shape[1]} columns"
        )
    product = A.float() @ (B.float() * B_scale_.float().view(1, -1))
    return finish(product, bias_, A.dtype)


def as_matrix(scale: torch.Tensor) -> torch.Tensor:
    """A scale as a matrix in fp32: one for all, or one row of one for each column."""
    scale = scale.float()
    return scale if scale.dim() == 2 else scale.view(1, -1)


def finish(
    product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The product plus the bias, in `dtype`; an empty bias means none."""
    if bias is not None and bias.numel():
        product = product + bias.float()
    return product.to(dtype)
