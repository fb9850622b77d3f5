# SPDX-License-Identifier: Apache-2.0
"""Batched FP8 product with block scales, of vllm-xpu-kernels 0.1.11 and later."""

import torch

from standins.emulated_xpu.wheel.formats import expanded
from standins.emulated_xpu.wheel.implementations import implements


@implements("_xpu_C::fp8_bmm")
def fp8_bmm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None,
    A_scale_: torch.Tensor | None,
    B_scale_: torch.Tensor | None,
    bias_: torch.Tensor | None,
) -> torch.Tensor:
    """`[G, M, K] @ [G, K, N]` of FP8 values times their scales, summed in fp32.

    vLLM passes scales, fp32 or e8m0, of shapes `[G, M, K / 128]` and
    `[G, K / 128, N / 128]`. They must be contiguous; the values may be strided.
    """
    if A_scale_ is None or B_scale_ is None or bias_ is not None:
        raise NotImplementedError("fp8_bmm without scales or with a bias")
    for name, scale in (("A_scale_", A_scale_), ("B_scale_", B_scale_)):
        if not scale.is_contiguous():
            raise ValueError(f"fp8_bmm: {name} must be contiguous")
    product = (A.float() * expanded(A_scale_.float(), A.shape)) @ (
        B.float() * expanded(B_scale_.float(), B.shape)
    )
    return product.to(out_dtype or torch.float32)
