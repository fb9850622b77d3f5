# SPDX-License-Identifier: Apache-2.0
"""Rows in MXFP8, whose bytes are those of float64, and norms before them."""

import pytest
import torch
from compare import assert_close

from kernels.reference.linear import mxfp8_quant as reference
from kernels.xpu_dsv4.linear.mxfp8_quant import mxfp8_quantize, q_kv_norm_mxfp8


def hard_rows(tokens, width):
    """Groups of many sizes: zeros, the ends of a scale, subnormal codes, few values."""
    x = torch.randn(tokens, width)
    x *= torch.ldexp(torch.ones(width), torch.arange(width) // 32 % 41 - 20)
    x[0, :32] = 0.0
    x[-1, :32] = torch.linspace(-1, 1, 32) * 2.0**-9
    x[-1, 0] = 1.0
    x[-1, -1] = -448.0 * 2.0**15
    x[tokens // 2] *= 2.0**-40
    x[0, -32:] = 448.0 * 2.0**-11
    return x.bfloat16()


def as_bytes(x):
    return x.cpu().contiguous().view(torch.uint8)


def check_rows(mine, want, tokens, width):
    codes, scales = mine
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (tokens, width)
    assert scales.dtype == torch.float8_e8m0fnu
    assert scales.shape == (tokens, width // 32)
    assert codes.is_contiguous() and scales.is_contiguous()
    assert torch.equal(as_bytes(scales), as_bytes(want[1]))
    assert torch.equal(as_bytes(codes), as_bytes(want[0]))


@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 5120), (3, 1280), (5, 32), (7, 1056), (63, 96)]
)
def test_bytes(tokens, width, device):
    torch.manual_seed(tokens)
    x = hard_rows(tokens, width)
    check_rows(mxfp8_quantize(x.to(device)), reference.mxfp8_quantize(x), tokens, width)


@pytest.mark.parametrize(
    ("tokens", "matrices", "width"), [(1, 8, 1024), (3, 2, 96), (5, 1, 64), (7, 3, 32)]
)
def test_rows_of_several_matrices(tokens, matrices, width, device):
    """As a batched product lays them out: `[G, T, K / G]`."""
    torch.manual_seed(tokens)
    x = hard_rows(tokens, matrices * width)
    product = x.view(tokens, matrices, width).transpose(0, 1).contiguous().to(device)
    mine = mxfp8_quantize(product.transpose(0, 1))
    check_rows(mine, reference.mxfp8_quantize(x), tokens, matrices * width)


def test_rows_apart(device):
    torch.manual_seed(3)
    x = hard_rows(5, 64)
    wide = torch.full((5, 100), 77.0).bfloat16().to(device)
    wide[:, 3:67] = x
    check_rows(mxfp8_quantize(wide[:, 3:67]), reference.mxfp8_quantize(x), 5, 64)


def test_what_is_not_finite(device):
    """NaN stays NaN in its group, and other groups have what they had."""
    x = torch.ones(2, 64).bfloat16()
    x[0, 3] = float("nan")
    codes, _ = mxfp8_quantize(x.to(device))
    values = codes.cpu().float()
    assert values[0, 3].isnan() and values.isnan().sum() == 1
    assert (values[0, 32:] == 256).all() and (values[1] == 256).all()


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "q_size", "kv_size"), [(1, 1280, 512), (5, 96, 512), (63, 1024, 32)]
)
def test_norms(tokens, q_size, kv_size, weights, device):
    """A norm in fp32 may round to bf16's neighbour: few codes differ, by one."""
    torch.manual_seed(tokens)
    rows = torch.randn(tokens, q_size + kv_size).bfloat16().to(device)
    q, kv = rows.split([q_size, kv_size], dim=-1)
    scale = [(1 + torch.randn(n) / 4).to(weights) for n in (q_size, kv_size)]
    q_weight, kv_weight = (w.to(device) for w in scale)
    codes, scales, normed = q_kv_norm_mxfp8(q, kv, q_weight, kv_weight, 1e-6)
    want, want_scales, want_kv = reference.q_kv_norm_mxfp8(
        q.cpu(), kv.cpu(), *scale, 1e-6
    )
    assert torch.equal(as_bytes(scales), as_bytes(want_scales))
    differ = as_bytes(codes) != as_bytes(want)
    assert differ.double().mean() < 1e-3
    step = as_bytes(codes)[differ].int() - as_bytes(want)[differ].int()
    assert (step.abs() <= 1).all()
    assert normed.dtype == torch.bfloat16 and normed.is_contiguous()
    largest = float(want_kv.abs().max())
    assert_close(normed, want_kv, absolute=2.0**-8 * largest, relative=3e-3)


def test_a_small_epsilon(device):
    """V4.1's is 1e-20: rows of zeros stay zeros."""
    q, kv = (torch.zeros(2, n).bfloat16().to(device) for n in (64, 32))
    ones = torch.ones(64).to(device)
    codes, scales, normed = q_kv_norm_mxfp8(q, kv, ones, ones[:32], 1e-20)
    assert not codes.cpu().float().any() and not normed.any()
    assert scales.cpu().float().isfinite().all()


def test_no_tokens(device):
    x = torch.zeros(0, 64).bfloat16().to(device)
    codes, scales = mxfp8_quantize(x)
    assert codes.shape == (0, 64) and scales.shape == (0, 2)
    weight = torch.ones(64).to(device)
    assert q_kv_norm_mxfp8(x, x, weight, weight, 1e-6)[2].shape == (0, 64)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: mxfp8_quantize(torch.zeros(2, 64)), "x.dtype = torch.float32"),
        (lambda: mxfp8_quantize(torch.zeros(2, 48).bfloat16()), "a multiple of 32"),
        (lambda: mxfp8_quantize(torch.zeros(64).bfloat16()), "[T, K] or [T, G, K / G]"),
        (lambda: mxfp8_quantize(torch.zeros(64, 2).bfloat16().T), "a last stride of 1"),
        (lambda: norm(kv=torch.zeros(3, 32).bfloat16()), "kv.shape = [3, 32]"),
        (lambda: norm(q_weight=torch.zeros(32)), "q_weight.shape = [32]"),
        (lambda: norm(kv_weight=torch.zeros(32).half()), "kv_weight.dtype"),
        (lambda: norm(q=torch.zeros(2, 48).bfloat16()), "q.shape = [2, 48]"),
    ],
)
def test_arguments(made, message):
    with pytest.raises(ValueError) as error:
        made()
    assert message in str(error.value)


def norm(**given):
    arguments = {
        "q": torch.zeros(2, 64).bfloat16(),
        "kv": torch.zeros(2, 32).bfloat16(),
        "q_weight": torch.zeros(64),
        "kv_weight": torch.zeros(32),
        "eps": 1e-6,
    }
    return q_kv_norm_mxfp8(**arguments | given)
