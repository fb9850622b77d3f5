# SPDX-License-Identifier: Apache-2.0
"""Linear layers with MXFP4 weights multiply by the operators of XPU."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers, packed_formats

TOKENS, OUTPUTS, INPUTS = 5, 96, 256
MXFP4 = packed_formats.Mxfp4()


def linear() -> Any:
    """A layer of that format, not loaded."""
    config = model_configs.vllm_config()
    MXFP4.take(config, leave_out=[])
    return model_layers.linear(config, INPUTS, OUTPUTS)


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().double() - wanted).norm() / wanted.norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(TOKENS,), (TOKENS, 1)], ids=["flat", "nested"])
def test_it_multiplies_what_is_packed(shape: tuple[int, ...]) -> None:
    built = linear()
    weight = packed_formats.load(MXFP4, built, OUTPUTS, INPUTS)
    x = torch.randn(*shape, INPUTS, dtype=torch.bfloat16)
    bias = torch.randn(OUTPUTS, dtype=torch.bfloat16)
    on_device = x.to(layout.device()), bias.to(layout.device())
    got = built.quant_method.apply(built, *on_device)
    wanted = MXFP4.seen(x.view(TOKENS, INPUTS)) @ weight.T + bias.double()
    error = off_by(got.view(TOKENS, OUTPUTS), wanted)
    print(f"figure: off by {error:.4f}")
    assert error < 3e-3, f"the product is off by {error:.4f}"
    assert got.dtype == torch.bfloat16
    assert got.shape[:-1] == shape


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_call_marlin(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{layout.LAYER_QUANTIZATION}.compressed_tensors.schemes"
    home = layout.module(f"{name}.compressed_tensors_w4a16_mxfp4")
    if hasattr(home, "current_platform"):
        another = layout.another_platform(home.current_platform)
        monkeypatch.setattr(home, "current_platform", another)
    prepared = []
    monkeypatch.setattr(home, "prepare_fp4_layer_for_marlin", prepared.append)
    built = linear()
    packed_formats.load(MXFP4, built, OUTPUTS, INPUTS)
    assert prepared == [built]
