# SPDX-License-Identifier: Apache-2.0
"""Linear layers in MXFP4: quantization of activations and the product."""

import torch

from standins.emulated_xpu.wheel.formats import (
    e2m1_codes,
    mxfp4_to_float,
    pack_nibbles,
    power_of_two_exponent,
    quotient,
)
from standins.emulated_xpu.wheel.implementations import implements


@implements("_C::per_token_group_quant_mxfp4")
def per_token_group_quant_mxfp4(
    input: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
) -> None:
    """`[M, K]` to packed e2m1 codes `[M, K / 2]` and powers of two `[M, K / group]`."""
    groups = input.float().unflatten(-1, (-1, group_size))
    exponent = power_of_two_exponent(quotient(groups.abs().amax(-1).clamp(min=eps), 6))
    codes = e2m1_codes(torch.ldexp(groups, -exponent[..., None])).flatten(-2)
    output_q.view(torch.uint8).copy_(pack_nibbles(codes))
    output_s.copy_(torch.exp2(exponent.float()))


@implements("_xpu_C::fp4_gemm")
def fp4_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias_: torch.Tensor | None,
) -> torch.Tensor:
    """`[M, K] @ [K, N]` of MXFP4 values, summed in fp32.

    A holds two values per byte along K, and so does B, which is the transposed view of
    `[N, K / 2]`; scales are e8m0 of shapes `[M, K / 32]` and `[K / 32, N]`.
    """
    a = mxfp4_to_float(A, A_scale)
    b = mxfp4_to_float(B.t(), B_scale.t().contiguous())
    out = a @ b.T
    if bias_ is not None:
        out = out + bias_.float()
    return out.to(out_dtype or torch.get_default_dtype())
