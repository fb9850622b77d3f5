# SPDX-License-Identifier: Apache-2.0
"""The stand-in of the batched FP8 product."""

import pytest
import torch

from standins.emulated_xpu.ops.fp8_bmm import fp8_bmm

G, M, K, N, BLOCK = 3, 5, 384, 256, 128


def operands() -> tuple[torch.Tensor, ...]:
    """FP8 values of both operands, then their power-of-two scales."""
    generator = torch.Generator().manual_seed(0)

    def power(*shape: int) -> torch.Tensor:
        exponent = torch.randint(-6, 6, shape, generator=generator)
        return torch.ldexp(torch.ones(shape), exponent)

    a = torch.randn(G, M, K, generator=generator).to(torch.float8_e4m3fn)
    b = torch.randn(G, N, K, generator=generator).to(torch.float8_e4m3fn)
    return (
        a,
        b.transpose(1, 2),
        power(G, M, K // BLOCK),
        power(G, K // BLOCK, N // BLOCK),
    )


def test_each_block_has_its_own_scales() -> None:
    a, b, a_scale, b_scale = operands()
    product = fp8_bmm(a, b, torch.bfloat16, a_scale, b_scale, None)
    expected = torch.zeros(G, M, N, dtype=torch.float64)
    for k in range(K // BLOCK):
        rows = slice(k * BLOCK, (k + 1) * BLOCK)
        block_product = a[:, :, rows].double() @ b[:, rows].double()
        columns = b_scale[:, k].double().repeat_interleave(BLOCK, 1)[:, None]
        expected += block_product * a_scale[:, :, k, None].double() * columns
    assert product.dtype == torch.bfloat16
    assert (product - expected).norm() < 4e-3 * expected.norm()


def test_strided_scales_are_refused() -> None:
    """The op needs contiguous scales."""
    a, b, a_scale, b_scale = operands()
    strided = a_scale.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="A_scale_ must be contiguous"):
        fp8_bmm(a, b, torch.bfloat16, strided, b_scale, None)


def test_scales_of_another_block_size_are_refused() -> None:
    a, b, _, b_scale = operands()
    with pytest.raises(ValueError, match=r"\(3, 5, 7\) do not tile \(3, 5, 384\)"):
        fp8_bmm(a, b, torch.bfloat16, torch.ones(G, M, 7), b_scale, None)
