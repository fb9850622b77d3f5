# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of FP8 products, with the scales that each pinned version takes."""

import pytest
import torch

from standins.emulated_xpu.ops.fp8_gemm import fp8_gemm, fp8_gemm_w8a16
from standins.emulated_xpu.wheel.pins import OVERRIDE

M, K, N = 3, 256, 384


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


def power(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.ldexp(
        torch.ones(shape), torch.randint(-5, 5, shape, generator=generator)
    )


def assert_product(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`product` is `a @ b` up to one rounding to 16 bits."""
    expected = a.double() @ b.double()
    assert (product.double() - expected).norm() < 4e-3 * expected.norm()


def test_a_scale_for_each_token_and_channel() -> None:
    a, b = values(M, K), values(N, K, seed=1).t()
    tokens, channels, bias = power(M, 1), power(N), torch.randn(N)
    product = fp8_gemm(a, b, torch.bfloat16, tokens, channels, bias)
    expected = (a.double() * tokens) @ (b.double() * channels) + bias
    assert (product.double() - expected).norm() < 4e-3 * expected.norm()


def test_one_scale_for_all_and_an_empty_bias() -> None:
    a, b = values(M, K), values(K, N)
    product = fp8_gemm(
        a, b, None, torch.tensor([2.0]), torch.tensor([0.25]), torch.Tensor()
    )
    assert product.dtype == torch.bfloat16
    assert_product(product, a.float() / 2, b.float())


@pytest.mark.parametrize("version", ["0.1.8", "0.1.15.4"])
def test_microscaling(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, version)
    a, b = values(M, K), values(K, N)
    rows, columns = power(M, K // 32), power(K // 32, N)
    scales = [scale.to(torch.float8_e8m0fnu) for scale in (rows, columns)]
    product = fp8_gemm(a, b, torch.float16, *scales, None)
    assert_product(
        product,
        a.float() * rows.repeat_interleave(32, 1),
        b.float() * columns.repeat_interleave(32, 0),
    )
    with pytest.raises(ValueError, match="MXFP8 wants weight scales"):
        fp8_gemm(a, b, None, scales[0], scales[1][:, :3], None)


def test_fp32_blocks_come_after_0_1_8(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = values(M, K), values(K, N)
    rows, blocks = power(M, K // 128), power(K // 128, N // 128)
    monkeypatch.setenv(OVERRIDE, "0.1.11.1")
    product = fp8_gemm(a, b, None, rows, blocks, None)
    assert_product(
        product,
        a.float() * rows.repeat_interleave(128, 1),
        b.float() * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1),
    )
    monkeypatch.setenv(OVERRIDE, "0.1.8")
    with pytest.raises(ValueError, match="do not go together"):
        fp8_gemm(a, b, None, rows, blocks.to(torch.float8_e8m0fnu), None)
    with pytest.raises(NotImplementedError, match=r"0\.1\.8 has no fp32 block scales"):
        fp8_gemm(a, b, None, rows, blocks, None)


@pytest.mark.parametrize("shape", [(1,), (N,), (N, 1), (1, N)])
def test_weights_alone(shape: tuple[int, ...]) -> None:
    a = torch.randn(2, M, K).bfloat16()
    b, scale = values(N, K, seed=1).t(), power(*shape)
    product = fp8_gemm_w8a16(a, b, scale, None)
    assert product.shape == (2, M, N) and product.dtype == torch.bfloat16
    assert_product(product, a, b.float() * scale.view(1, -1))
    with pytest.raises(ValueError, match="2 scales for 384 columns"):
        fp8_gemm_w8a16(a, b, torch.ones(2), None)
