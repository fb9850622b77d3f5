# SPDX-License-Identifier: Apache-2.0
"""Linear layers with FP8 weights that have a scale for each row, or one for all, as
compressed-tensors writes them."""

from typing import Any

import torch

from . import layout


def take(config: Any, weights: str, activations: str | None) -> None:
    """Let the linear layers of `config` have FP8 weights with scales by `weights`
    ("channel" or "tensor"), and FP8 activations: with a scale for each "token" that is
    found as they come, with one of the "tensor" in the checkpoint, or none."""
    quantization = layout.module(
        f"{layout.LAYER_QUANTIZATION}.compressed_tensors.compressed_tensors"
    )
    values = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**values, "strategy": weights, "dynamic": False},
        "input_activations": activations
        and {**values, "strategy": activations, "dynamic": activations == "token"},
        "format": "float-quantized",
    }
    config.quant_config = quantization.CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": [],
        }
    )


def load(linear: torch.nn.Module) -> torch.Tensor:
    """Give `linear` random codes and scales, let vLLM process them as after loading,
    and return what they stand for, in float64."""
    codes = torch.randn(linear.weight.shape).to(torch.float8_e4m3fn)
    scale = torch.rand(linear.weight_scale.shape) * 0.01 + 0.001
    linear.weight.data.copy_(codes)
    linear.weight_scale.data.copy_(scale)
    if getattr(linear, "input_scale", None) is not None:
        linear.input_scale.data.fill_(0.01)
    linear.quant_method.process_weights_after_loading(linear)
    return codes.double() * scale.double().view(-1, 1)
