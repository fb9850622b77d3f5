# SPDX-License-Identifier: Apache-2.0
"""Triton multiplies FP8 blocks by FP8 blocks, and queries ROCm only on ROCm."""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import kernel_trace, layout
from helpers.block_fp8 import BLOCK

UTILITIES = f"{layout.LAYER_QUANTIZATION}.utils.fp8_utils"
ROWS, INPUTS, OUTPUTS = 3, 256, 384
TOLERANCE = 5e-3


def off_by() -> float:
    """The relative error of a product in BF16."""
    layout.module(f"{layout.LINEAR_KERNELS}.scaled_mm.triton")
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, INPUTS), torch.randn(OUTPUTS, INPUTS)
    x_scale = torch.rand(ROWS, INPUTS // BLOCK) + 0.5
    scale = torch.rand(OUTPUTS // BLOCK, INPUTS // BLOCK) + 0.5
    x, weight = (values.to(torch.float8_e4m3fn) for values in (x, weight))
    operands = [one.to(layout.device()) for one in (x, weight, x_scale, scale)]
    got = torch.ops.vllm.w8a8_triton_block_scaled_mm_func(
        *operands, [BLOCK, BLOCK], torch.bfloat16
    )
    rows = x.double() * x_scale.double().repeat_interleave(BLOCK, 1)
    each = scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    wanted = rows @ (weight.double() * each).T
    return float((got.cpu().double() - wanted).norm() / wanted.norm())


def test_it_multiplies() -> None:
    error = off_by()
    print(f"figure: the product is off by {error:.4f}")
    assert error < TOLERANCE


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_gfx1250_multiplies_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities = layout.module(UTILITIES)
    rocm = layout.another_platform(utilities.current_platform, rocm=True)
    monkeypatch.setattr(utilities, "current_platform", rocm)
    monkeypatch.setitem(
        sys.modules, "vllm.platforms.rocm", SimpleNamespace(on_gfx1250=lambda: True)
    )
    with kernel_trace.options_of_launches(monkeypatch) as launches:
        assert off_by() < TOLERANCE
    assert not launches, "a Triton kernel multiplies"
