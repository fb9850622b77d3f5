# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of inverse RoPE against the kernels that take their place, bit by bit.

The ops have no e4m3 subnormals; these codes are held to their own rule.
"""

import pytest
import torch

from kernels.reference.mla import inv_rope as reference
from standins.emulated_xpu.ops.inv_rope import (
    deepseek_inv_rope_bf16,
    deepseek_inv_rope_fp8_quant,
)

POSITIONS = 37


def arguments(
    tokens: int, groups: int, heads: int, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int]:
    """Heads of all sizes, with zeros, signed zeros and a maximum of 448 * 2^k."""
    generator = torch.Generator().manual_seed(tokens * heads)
    o = torch.randn(tokens, groups * heads, 512, generator=generator)
    o *= torch.exp2(torch.arange(512) % 13 - 8) * scale
    o[:1, :1, :128] = 0.0
    o[:1, :1, 128:256] = -0.0
    o[:1, :1, 256:384] *= 2.0**-9
    o[:1, :1, 300] = 448 * 2.0**-5
    angles = torch.rand(POSITIONS, 32, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    return o.bfloat16(), positions, table, groups, heads, 448, 64


SHAPES = [(3, 2, 4), (1, 8, 8), (7, 3, 5), (63, 1, 1), (0, 2, 4)]
SHAPE_NAMES = [f"T{t}-G{g}-H{h}" for t, g, h in SHAPES]


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_bf16_rows_are_those_of_the_kernel(
    shape: tuple[int, int, int], kernel_device: torch.device
) -> None:
    from kernels.xpu_dsv4.mla import inv_rope

    o, positions, table, *sizes = arguments(*shape)
    on_device = (x.to(kernel_device) for x in (o, positions, table))
    mine = inv_rope.inv_rope_bf16(*on_device, *sizes).cpu()
    rows = deepseek_inv_rope_bf16(o, positions, table, *sizes)
    assert rows.is_contiguous() and rows.shape == mine.shape
    assert torch.equal(rows.view(torch.int16), mine.contiguous().view(torch.int16))


@pytest.mark.parametrize("scale", [1.0, 2.0**-40], ids=["", "tiny"])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_codes_and_scales_are_those_of_the_kernel(
    shape: tuple[int, int, int], scale: float, kernel_device: torch.device
) -> None:
    from kernels.xpu_dsv4.mla import inv_rope

    o, positions, table, *sizes = arguments(*shape, scale)
    mine, mine_scales = inv_rope.inv_rope_fp8_quant(
        *(x.to(kernel_device) for x in (o, positions, table)), *sizes
    )
    mine, mine_scales = mine.transpose(0, 1).cpu(), mine_scales.transpose(0, 1).cpu()
    codes, scales = deepseek_inv_rope_fp8_quant(o, positions, table, *sizes)
    assert codes.is_contiguous() and codes.shape == mine.shape
    assert scales.is_contiguous() and torch.equal(scales, mine_scales)
    op, kernel = codes.view(torch.uint8), mine.view(torch.uint8)
    normal = kernel & 0x7F > 8
    assert torch.equal(op[normal], kernel[normal])
    # 2^-6 may have been a subnormal that rounded up.
    assert ((op - kernel)[~normal].view(torch.int8).abs() <= 4).all()
    assert normal.float().mean() > 0.5 or not normal.numel()


def test_bf16_rows_are_the_rounded_rotation() -> None:
    case = arguments(3, 2, 4)
    rows, expected = deepseek_inv_rope_bf16(*case), reference.inv_rope_bf16(*case)
    assert rows.shape == expected.shape
    assert (rows - expected).abs().max() < 2**-7 * expected.abs().max()
    assert (rows - expected).norm() < 3e-3 * expected.norm()


def test_they_refuse_what_the_kernels_refuse() -> None:
    o, positions, table, *sizes = arguments(3, 2, 4)
    for bad in (
        (o.transpose(0, 1).contiguous().transpose(0, 1), positions, table),
        (o, positions.int(), table),
        (o, positions, table.bfloat16()),
        (o[:, :4], positions, table),
    ):
        with pytest.raises(ValueError, match="deepseek_inv_rope"):
            deepseek_inv_rope_bf16(*bad, *sizes)
