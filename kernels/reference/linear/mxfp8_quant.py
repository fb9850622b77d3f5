# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of rows in MXFP8, and of norms before them."""

import torch

from .._quant import block_exponent, e4m3_bytes


def mxfp8_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.linear.mxfp8_quant.mxfp8_quantize`."""
    rows = x.double().reshape(x.shape[0], -1)
    exponent = block_exponent(rows, 32, 448.0, 1e-10)
    codes = e4m3_bytes(rows, exponent).view(torch.float8_e4m3fn)
    return codes, exponent.byte().view(torch.float8_e8m0fnu)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps)` times the weights, of each row, in float64."""
    x = x.double()
    mean = x.square().mean(-1, keepdim=True)
    return x / (mean + eps).sqrt() * weight.double()


def q_kv_norm_mxfp8(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.linear.mxfp8_quant.q_kv_norm_mxfp8`; keys in float64."""
    codes, scales = mxfp8_quantize(rms_norm(q, q_weight, eps).bfloat16())
    return codes, scales, rms_norm(kv, kv_weight, eps)
