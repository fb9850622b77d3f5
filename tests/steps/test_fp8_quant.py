# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 linear layers on XPU: the kernel chosen, its weights, its
results."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import block_fp8, kernel_trace, layout, model_configs, model_layers

TOKENS = 5
# Inputs, outputs: whole blocks, then the last block of both partial.
SHAPES = [(256, 384), (192, 320)]
named = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"K{s[0]}-N{s[1]}")


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().double() - wanted).norm() / wanted.norm())


def inputs(width: int) -> torch.Tensor:
    return torch.randn(TOKENS, width, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@named
def test_weight_only_by_default(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = model_layers.linear(model_configs.vllm_config(quantized=True), *shape)
    weight = block_fp8.load(linear)
    x, bias = inputs(shape[0]), torch.randn(shape[1], dtype=torch.bfloat16)
    on_device = x.view(TOKENS, 1, -1).to(layout.device()), bias.to(layout.device())
    with kernel_trace.traced(monkeypatch) as trace:
        got = linear.quant_method.apply(linear, *on_device)
    error = off_by(got.view(TOKENS, -1), x.double() @ weight.T + bias.double())
    print(f"figure: off by {error:.4f}, makes {trace.made}")
    assert error < 4e-3, f"the product is off by {error:.4f}"
    assert got.dtype == torch.bfloat16
    assert len(trace.made) == 1, f"a call makes {trace.made}"


if "xpu" in layout.BLOCK_FP8_BACKENDS:

    @named
    def test_microscaled_product(shape: tuple[int, int]) -> None:
        config = model_configs.vllm_config(quantized=True)
        linear = model_layers.linear(config, *shape, backend="xpu")
        weight = block_fp8.load(linear)
        x = inputs(shape[0])
        got = linear.quant_method.apply(linear, x.to(layout.device()))
        wanted = block_fp8.as_e4m3(x, 32, power_of_two=True) @ weight.T
        error = off_by(got, wanted)
        assert error < 4e-3, f"the product is off by {error:.4f}"
        assert linear.weight.dtype == torch.float8_e4m3fn
        assert linear.weight_scale_inv.shape == (shape[0] // 32, shape[1])


# Uncompiled, the quantization of a partial block leaves strided values, which the
# kernel refuses.
@pytest.mark.compiled
@named
def test_triton_gets_its_scales_converted_once(shape: tuple[int, int]) -> None:
    config = model_configs.vllm_config(quantized=True)
    linear = model_layers.linear(config, *shape, backend="triton")
    weight = block_fp8.load(linear)
    dtype = linear.weight_scale_inv.dtype
    assert dtype == torch.float32, f"each call must convert scales of {dtype}"
    x = inputs(shape[0])
    got = linear.quant_method.apply(linear, x.to(layout.device()))
    wanted = block_fp8.as_e4m3(x, 128, power_of_two=False) @ weight.T
    error = off_by(got, wanted)
    assert error < 4e-3, f"the product is off by {error:.4f}"


@pytest.mark.unchanged
def test_other_scales_keep_their_fp8_weights() -> None:
    config = model_configs.vllm_config(quantized=True)
    linear = model_layers.linear(config, 256, 384, backend="fp32")
    kernel = type(linear.quant_method.fp8_linear).__name__
    assert kernel == "TritonFp8BlockScaledMMKernel"
    weight = block_fp8.load(linear)
    x = inputs(256)
    got = linear.quant_method.apply(linear, x.to(layout.device()))
    wanted = block_fp8.as_e4m3(x, 128, power_of_two=False) @ weight.T
    assert off_by(got, wanted) < 4e-3


@pytest.mark.unchanged
def test_the_pinned_op_quantizes_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def op(*arguments: Any) -> None:
        calls.append(arguments)

    utils = layout.module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(per_token_group_fp8_quant=op))
    x = inputs(256).to(layout.device())
    values, scales = utils.per_token_group_quant_fp8(x, 128, use_ue8m0=False)
    assert calls, "a Triton kernel quantized"
    assert calls[0][3:] == (128, 1e-10, -448.0, 448.0, False)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (TOKENS, 2)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_keep_their_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = layout.module("vllm.model_executor.kernels.linear")
    for platform, choice in kernels._POSSIBLE_FP8_BLOCK_KERNELS.items():
        if platform.name != "XPU":
            assert not [kind for kind in choice if kind.__name__.startswith("XPU")]
    fp8 = layout.module("vllm.model_executor.layers.quantization.fp8")
    another = layout.another_platform(fp8.current_platform)
    monkeypatch.setattr(fp8, "current_platform", another)
    config = model_configs.vllm_config(quantized=True)
    with model_configs.current(config):
        method = fp8.Fp8LinearMethod(config.quant_config)
    assert method.is_scale_e8m0
    assert method.weight_quant_key == fp8.kFp8Static128BlockSym
