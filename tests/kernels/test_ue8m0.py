# SPDX-License-Identifier: Apache-2.0
"""Exponents and codes by bits against exact arithmetic, exhaustive where possible."""

import pytest
import torch

from kernels.reference._quant import block_exponent, e2m1_nibbles
from kernels.xpu_dsv4 import _ue8m0
from kernels.xpu_dsv4._triton import tl, triton

e4m3_exponent, e2m1_exponent = _ue8m0.e4m3_exponent, _ue8m0.e2m1_exponent
exponent_scale, exponent_inverse = _ue8m0.exponent_scale, _ue8m0.exponent_inverse
e4m3_code, e2m1_code = _ue8m0.e4m3_code, _ue8m0.e2m1_code


@triton.jit
def _apply_kernel(x_ptr, out_ptr, count, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=1.0)
    if WHAT == "e4m3_exponent":
        y = e4m3_exponent(x)
    elif WHAT == "e2m1_exponent":
        y = e2m1_exponent(x)
    elif WHAT == "e4m3_log2":
        y = tl.ceil(tl.log2(x * (1.0 / 448.0))).to(tl.int32) + 127
    elif WHAT == "e2m1_log2":
        y = tl.ceil(tl.log2(x * (1.0 / 6.0))).to(tl.int32) + 127
    elif WHAT == "e4m3_code":
        y = e4m3_code(x)
    else:
        y = e2m1_code(x)
    tl.store(out_ptr + i, y, mask=i < count)


@triton.jit
def _scale_kernel(exponent_ptr, scale_ptr, inverse_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    exponent = tl.load(exponent_ptr + i)
    tl.store(scale_ptr + i, exponent_scale(exponent))
    tl.store(inverse_ptr + i, exponent_inverse(exponent))


def apply(what: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.int32, device=x.device)
    block = 4096
    grid = (triton.cdiv(x.numel(), block),)
    _apply_kernel[grid](x, out, x.numel(), WHAT=what, BLOCK=block)
    return out


def around(x: torch.Tensor) -> torch.Tensor:
    """fp32 values with both neighbours of each."""
    bits = x.float().contiguous().view(torch.int32)
    return torch.cat((bits - 1, bits, bits + 1)).view(torch.float32)


@pytest.mark.parametrize(
    ("what", "largest", "lowest"), [("e4m3", 448.0, -14), ("e2m1", 6.0, -123)]
)
def test_exponent_at_powers_of_two(what, largest, lowest, device):
    k = torch.arange(lowest, 119)
    exact = torch.ldexp(torch.full_like(k, largest, dtype=torch.float64), k)
    x = torch.cat((around(exact), around(torch.ldexp(torch.ones_like(exact), k))))
    got = apply(f"{what}_exponent", x.to(device)).cpu()
    want = block_exponent(x.double()[:, None], 1, largest, 0.0)[:, 0]
    assert torch.equal(got.long(), want)
    at = got[len(k) : 2 * len(k)].long()
    assert torch.equal(at, k + 127), "largest * 2^k needs exponent k"


def test_exponent_of_random_values(device):
    torch.manual_seed(0)
    x = torch.ldexp(torch.rand(10_000) + 0.5, torch.randint(-13, 120, (10_000,)))
    got = apply("e4m3_exponent", x.to(device))
    want = block_exponent(x.double()[:, None], 1, 448.0, 0.0)[:, 0]
    assert torch.equal(got.cpu().long(), want)


@pytest.mark.parametrize(
    ("what", "largest", "least"), [("e4m3", 448.0, 1e-4), ("e2m1", 6.0, 6 * 2.0**-126)]
)
def test_upstream_finds_the_same_exponent_of_every_bf16(what, largest, least, device):
    """By ceil(log2(amax / largest)), as its kernels for compressed keys take it: their
    amax are BF16 values, and none is near enough to a power of two to round to it."""
    x = torch.arange(1, 0x7F80).to(torch.int16).view(torch.bfloat16).float()
    x = x.clamp(min=least)
    want = block_exponent(x.double()[:, None], 1, largest, 0.0)[:, 0]
    for how in ("log2", "exponent"):
        got = apply(f"{what}_{how}", x.to(device)).cpu().long()
        wrong = x[got != want]
        assert not len(wrong), f"by {how}: {len(wrong)} of {len(x)}, such as {wrong[0]}"


def test_e4m3_code_of_every_bf16(device):
    x = torch.arange(65536).to(torch.int16).view(torch.bfloat16).float()
    got = apply("e4m3_code", x.to(device)).cpu()
    finite = x.isfinite()
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
    assert torch.equal(got[finite], want[finite])
    assert torch.equal(got[x.isnan()] & 0x7F, torch.full_like(got[x.isnan()], 0x7F))
    assert got[x == torch.inf].item() == 0x7E and got[x == -torch.inf].item() == 0xFE


def test_e4m3_code_at_ties(device):
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    x = around(torch.cat((codes[1:], middle)))
    x = torch.cat((x, -x))
    got = apply("e4m3_code", x.to(device)).cpu()
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
    assert torch.equal(got, want)


def test_e2m1_code_at_ties(device):
    grid = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x = torch.cat((around(grid), torch.tensor([0.0, 1e-30, 7.0, 1e30])))
    x = torch.cat((x, -x))
    got = apply("e2m1_code", x.to(device)).cpu()
    exponent = torch.full((x.numel(), 1), 127)
    want = e2m1_nibbles(x.double()[:, None], exponent)[:, 0]
    assert torch.equal(got, want.int())
    even = apply("e2m1_code", grid[7:].to(device)).cpu() % 2
    assert not even.any(), "a tie goes to the even code"


def test_scales(device):
    exponent = torch.arange(128, dtype=torch.int32, device=device) + 100
    scale = torch.empty(128, device=device)
    inverse = torch.empty(128, device=device)
    _scale_kernel[(1,)](exponent, scale, inverse, BLOCK=128)
    want = torch.ldexp(torch.ones(128), exponent.cpu() - 127)
    assert torch.equal(scale.cpu(), want)
    assert torch.equal(inverse.cpu(), 1 / want)
