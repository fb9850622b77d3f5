# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of INT4 products against float64."""

import pytest
import torch

from standins.emulated_xpu.ops import int4
from standins.emulated_xpu.wheel.formats import int4_to_float

ROWS, COLUMNS, DEPTH, GROUP = 5, 7, 96, 32


def words(codes: torch.Tensor) -> torch.Tensor:
    """`[N, K]` codes as `[N, K / 8]` words, the first in the lowest bits."""
    powers = 16 ** torch.arange(8)
    return (codes.long().unflatten(-1, (-1, 8)) * powers).sum(-1).to(torch.int32)


def test_product() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, DEPTH).bfloat16()
    codes = torch.randint(16, (COLUMNS, DEPTH))
    scales = torch.rand(DEPTH // GROUP, COLUMNS).bfloat16()
    bias = torch.randn(COLUMNS).bfloat16()
    zero = torch.tensor([8], dtype=torch.int8)
    got = int4.int4_gemm_w4a16(x, words(codes).t(), bias, scales, zero, GROUP, None)
    weight = (codes - 8).double() * scales.T.double().repeat_interleave(GROUP, -1)
    wanted = x.double() @ weight.T + bias.double()
    assert got.dtype == torch.bfloat16
    assert (got.double() - wanted).norm() < 3e-3 * wanted.norm()


def test_another_layout_is_refused() -> None:
    x, zero = torch.randn(1, 32), torch.tensor([8], dtype=torch.int8)
    straight = torch.zeros(4, 8, dtype=torch.int32)
    scales = torch.ones(1, 8)
    with pytest.raises(ValueError, match="not the transposed view"):
        int4.int4_gemm_w4a16(x, straight, None, scales, zero, 32, None)


def test_signed_values() -> None:
    packed = torch.arange(16, dtype=torch.uint8)[None] * 17
    values = int4_to_float(packed, torch.tensor([[1.0, 2.0]]))
    signed = torch.tensor([*range(8), *range(-8, 0)]).repeat_interleave(2).float()
    assert values.equal((signed * torch.tensor([1.0, 2.0]).repeat_interleave(16))[None])
