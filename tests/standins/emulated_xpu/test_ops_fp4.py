# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of MXFP4 linear layers against float64."""

import torch

from kernels.reference._quant import block_exponent, e2m1_nibbles
from kernels.reference.indexer.mqa_logits_mxfp4 import mxfp4_values
from standins.emulated_xpu.ops import fp4


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed values and e8m0 scales, from the op as vLLM calls it."""
    packed = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8)
    scales = torch.empty(x.shape[0], x.shape[1] // 32)
    fp4.per_token_group_quant_mxfp4(x, packed, scales, 32, 1e-10)
    return packed.view(torch.float4_e2m1fn_x2), scales.to(torch.float8_e8m0fnu)


def test_quantization_has_the_reference_bytes() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 96).bfloat16()
    packed, scales = quantized(x)
    exponent = block_exponent(x.double(), 32, 6.0, 1e-10)
    nibbles = e2m1_nibbles(x.double(), exponent)
    assert torch.equal(scales.view(torch.uint8).long(), exponent)
    expected = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
    assert torch.equal(packed.view(torch.uint8), expected)


def test_product_of_packed_operands() -> None:
    torch.manual_seed(1)
    a, a_scale = quantized(torch.randn(5, 64).bfloat16())
    b, b_scale = quantized(torch.randn(9, 64).bfloat16())
    bias = torch.randn(9).bfloat16()
    a_values = mxfp4_values(a.view(torch.uint8), a_scale.view(torch.uint8))
    b_values = mxfp4_values(b.view(torch.uint8), b_scale.view(torch.uint8))
    expected = a_values @ b_values.T + bias.double()
    scales = b_scale.t().contiguous()
    product = fp4.fp4_gemm(a, b.t(), a_scale, scales, torch.float32, bias)
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_zero_row_is_zero() -> None:
    packed, scales = quantized(torch.zeros(1, 32).bfloat16())
    assert not packed.view(torch.uint8).any()
    assert scales.float().isfinite().all()
