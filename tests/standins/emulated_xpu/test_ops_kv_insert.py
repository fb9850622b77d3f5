# SPDX-License-Identifier: Apache-2.0
"""The stand-in of the insert against the kernel that takes its place, bit by bit.

The op has no e4m3 subnormals; these codes are held to their own rule.
"""

from typing import Any

import pytest
import torch

from standins.emulated_xpu.ops.kv_insert import deepseek_qnorm_rope_kv_insert
from standins.emulated_xpu.wheel.formats import e4m3_codes_without_subnormals

POSITIONS, EPS = 41, 1e-6


def table() -> torch.Tensor:
    angles = torch.rand(POSITIONS, 32, generator=torch.Generator().manual_seed(1)) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def pages(blocks: int, block_size: int) -> torch.Tensor:
    """Pages of 0xA5 bytes whose stride is padded to a multiple of 576."""
    stride = -(-block_size * 584 // 576) * 576
    raw = torch.full((blocks * stride,), 0xA5, dtype=torch.uint8)
    return raw.as_strided((blocks, block_size, 584), (stride, 584, 1))


def raw_bytes(cache: torch.Tensor) -> torch.Tensor:
    raw = torch.tensor([], dtype=torch.uint8, device=cache.device)
    return raw.set_(cache.untyped_storage()).cpu()


def strided(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` in rows with 8 foreign ones after each."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), 77.0).to(x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def case(tokens: int, heads: int, block_size: int, gaps: bool) -> dict[str, Any]:
    """Queries of small integers, whose sum of squares no order of adding changes, and
    keys of all sizes; each third slot is -1."""
    generator = torch.Generator().manual_seed(tokens + heads)
    q = torch.randint(-60, 61, (tokens, heads, 512), generator=generator).bfloat16()
    kv = torch.randn(tokens, 512, generator=generator)
    kv *= torch.exp2(torch.arange(512) % 11 - 6)
    kv[:1, :64] = 0.0
    kv[:1, 64:128] = -0.0
    kv[:1, 128] = 448 * 2.0**-3
    blocks = tokens // block_size + 2
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[1::3] = -1
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    q, kv = (strided(q), strided(kv.bfloat16())) if gaps else (q, kv.bfloat16())
    return {"q": q, "kv": kv, "slots": slots, "positions": positions, "blocks": blocks}


SHAPES = [(5, 3, 64), (1, 64, 256), (23, 8, 7), (9, 0, 2), (6, 5, 1)]


@pytest.mark.parametrize("gaps", [False, True], ids=["", "strided"])
@pytest.mark.parametrize(
    "shape", SHAPES, ids=[f"T{t}-H{h}-page{b}" for t, h, b in SHAPES]
)
def test_queries_and_pages_are_those_of_the_kernel(
    shape: tuple[int, int, int], gaps: bool, kernel_device: torch.device
) -> None:
    from kernels.xpu_dsv4.kv.qnorm_rope_kv_insert import (
        xpu_qnorm_rope_kv_fp8_insert,
    )

    tokens, heads, block_size = shape
    given = case(tokens, heads, block_size, gaps)
    rest = (given["slots"], given["positions"], table())
    theirs, page = given["q"].clone(), pages(given["blocks"], block_size)
    mine = given["q"].to(kernel_device, copy=True)
    mine_page = pages(given["blocks"], block_size).to(kernel_device)
    deepseek_qnorm_rope_kv_insert(
        theirs, given["kv"], page, *rest, EPS, block_size, "fp8_ds_mla"
    )
    xpu_qnorm_rope_kv_fp8_insert(
        mine,
        given["kv"].to(kernel_device),
        mine_page,
        *(x.to(kernel_device) for x in rest),
        EPS,
        block_size,
    )
    assert torch.equal(theirs.view(torch.int16), mine.cpu().view(torch.int16))
    op, kernel = raw_bytes(page), raw_bytes(mine_page)
    codes = torch.zeros(op.shape, dtype=torch.bool)
    valid = given["slots"][given["slots"] >= 0]
    at = valid // block_size * page.stride(0) + valid % block_size * 576
    codes[at[:, None] + torch.arange(448)] = True
    small = codes & (kernel & 0x7F <= 8)
    assert torch.equal(op[~small], kernel[~small])
    # 2^-6 may have been a subnormal that rounded up.
    assert ((op - kernel)[small].view(torch.int8).abs() <= 4).all()
    assert small[codes].float().mean() < 0.5


def test_it_fails_where_the_kernel_touches_foreign_memory() -> None:
    given = case(5, 2, 4, False)
    q, kv, slots, positions = (given[k] for k in ("q", "kv", "slots", "positions"))
    beyond = slots.clone()
    beyond[0] = given["blocks"] * 4
    far = positions + POSITIONS
    for bad in ((slots[:4], positions), (beyond, positions), (slots, far)):
        with pytest.raises(IndexError):
            deepseek_qnorm_rope_kv_insert(
                q, kv, pages(given["blocks"], 4), *bad, table(), EPS, 4, "fp8_ds_mla"
            )
    with pytest.raises(ValueError, match="int64"):
        deepseek_qnorm_rope_kv_insert(
            *(q, kv, pages(given["blocks"], 4), slots.int(), positions, table()),
            *(EPS, 4, "fp8_ds_mla"),
        )


def test_codes_are_e4m3_but_for_subnormals() -> None:
    """All bf16 values up to 448, against torch's own cast."""
    bits = torch.arange(2**15, dtype=torch.int32) << 16
    values = bits.view(torch.float32)
    values = values[values <= 448]
    values = torch.cat((values, -values))
    codes = e4m3_codes_without_subnormals(values, torch.ones(()))
    exact = values.to(torch.float8_e4m3fn).view(torch.uint8)
    size = values.abs()
    assert torch.equal(codes[size >= 2**-6], exact[size >= 2**-6])
    assert not (codes[size < 2**-7] & 0x7F).any()
    between = (size >= 2**-7) & (size < 2**-6)
    held = (codes & 0x7F)[between] * 2.0**-9
    assert ((2 * size[between] - 2**-6) - held).abs().max() <= 2**-10
    error = (codes.view(torch.float8_e4m3fn).float() - values).abs()
    assert error[size < 2**-6].max() <= 2**-7 + 2**-11


@pytest.mark.parametrize("least", [1e-4, 1e-10])
def test_scales_of_all_mantissas(least: float) -> None:
    """The op multiplies by the fp32 value nearest to 1 / 448 and rounds the product up
    to a power of two: the same exponent as that of the exact quotient."""
    bits = torch.arange(2**23, dtype=torch.int32) | (127 << 23)
    for amax in (bits.view(torch.float32), torch.tensor([least])):
        product = amax * torch.tensor(1.0 / 448)
        rounded = product.view(torch.int32)
        exponent = (rounded + (rounded & 0x7FFFFF > 0).int() * 0x800000) >> 23
        exact = (amax.view(torch.int32) + (0x7FFFFF - 0x600000)) >> 23
        assert torch.equal(exponent, exact - 8)
