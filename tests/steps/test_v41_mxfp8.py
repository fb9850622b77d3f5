# SPDX-License-Identifier: Apache-2.0
"""V4.1's linear layers, with a scale for each 32 x 32, are read as MXFP8."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs

QUANTIZATION = "vllm.model_executor.layers.quantization"
SIZE = 64


def described(block: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }


def linear(block: int) -> Any:
    kind = layout.module(QUANTIZATION).get_quantization_config("deepseek_v4_fp8")
    layers = layout.module("vllm.model_executor.layers.linear")
    with model_configs.current(model_configs.vllm_config()), layout.worker():
        return layers.ReplicatedLinear(
            4 * SIZE,
            2 * SIZE,
            bias=False,
            quant_config=kind.from_config(described(block)),
            return_bias=False,
            prefix="layers.0.attn.wq_b",
        )


def test_the_product() -> None:
    layer = linear(32)
    method = type(layer.quant_method).__name__
    found = [name for name, _ in layer.named_parameters()]
    assert "weight_scale" in found, f"the layer is read by {method}: {found}"
    torch.manual_seed(0)
    codes = torch.randn(2 * SIZE, 4 * SIZE).to(torch.float8_e4m3fn)
    exponents = torch.randint(-3, 3, (2 * SIZE // 32, 4 * SIZE // 32))
    scales = torch.exp2(exponents.float()).to(torch.float8_e8m0fnu)
    layer.weight.weight_loader(layer.weight, codes)
    layer.weight_scale.weight_loader(layer.weight_scale, scales)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, 4 * SIZE).to(torch.bfloat16)
    whole = scales.float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    wanted = x.double() @ (codes.double() * whole.double()).T
    got = layer(x.to(layout.device())).cpu().double()
    assert (got - wanted).norm() < 0.05 * wanted.norm()


def test_v41_is_claimed() -> None:
    kind = layout.module(QUANTIZATION).get_quantization_config("deepseek_v4_fp8")
    config = type("Config", (), {"model_type": "deepseek_v41"})()
    claimed = kind.override_quantization_method(described(32), None, config)
    assert claimed == "deepseek_v4_fp8", f"V4.1 is read by {claimed}"


@pytest.mark.unchanged
def test_v4_keeps_its_class() -> None:
    kind = layout.module(QUANTIZATION).get_quantization_config("deepseek_v4_fp8")
    v4 = layout.module(layout.QUANTIZATION).DeepseekV4FP8Config
    assert issubclass(kind, v4)
    layer = linear(128)
    assert type(layer.quant_method).__name__ == "Fp8LinearMethod"
    assert "weight_scale_inv" in dict(layer.named_parameters())
