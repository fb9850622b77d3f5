# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of inverse RoPE against the kernels' float64 reference."""

import torch

from emulated_xpu.ops.inv_rope import (
    deepseek_inv_rope_bf16,
    deepseek_inv_rope_fp8_quant,
)
from kernels.reference import inv_rope as reference

TOKENS, GROUPS, HEADS = 3, 2, 4
SIZES = (GROUPS, HEADS // GROUPS, 448, 64)


def arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(TOKENS, HEADS, 512, generator=generator).to(torch.bfloat16)
    angles = torch.rand(9, 32, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return o, torch.tensor([8, 0, 3]), table


def test_bf16_rows_are_the_rounded_rotation() -> None:
    rows = deepseek_inv_rope_bf16(*arguments(), *SIZES)
    expected = reference.inv_rope_bf16(*arguments(), *SIZES)
    assert rows.shape == expected.shape
    assert (rows - expected).abs().max() < 2**-7 * expected.abs().max()
    assert (rows - expected).norm() < 3e-3 * expected.norm()


def test_codes_and_scales_are_those_of_the_reference() -> None:
    codes, scales = deepseek_inv_rope_fp8_quant(*arguments(), *SIZES)
    expected, expected_scales = reference.fused_inv_rope_fp8_quant(*arguments(), *SIZES)
    assert torch.equal(scales, expected_scales)
    differ = codes.view(torch.uint8) != expected.view(torch.uint8)
    assert differ.double().mean() < 1e-3


def test_a_maximum_of_448_times_a_power_of_two_keeps_that_power() -> None:
    o, positions, table = arguments()
    o.zero_()[:, :, :4] = 448 * 2.0**-5
    _, scales = deepseek_inv_rope_fp8_quant(o, positions, table, *SIZES)
    assert scales.view(TOKENS, HEADS, 4)[:, :, 0].eq(2.0**-5).all()
