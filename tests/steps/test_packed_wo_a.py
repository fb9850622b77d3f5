# SPDX-License-Identifier: Apache-2.0
"""A packed wo_a, which its owner multiplies group by group, is loaded unpacked."""

from typing import Any

import pytest
import torch
from helpers import layer_parts, layout, model_configs, model_layers, packed_formats

FORMATS: dict[str, Any] = {
    "nvfp4": packed_formats.Nvfp4(),
    "mxfp4": packed_formats.Mxfp4(),
    "int4": packed_formats.Int4(),
    "int4 of compressed-tensors": packed_formats.Int4OfCompressedTensors(),
}
NAMES = [*layout.PACKED_FORMATS, "int4 of compressed-tensors"]


def loaded(name: str, part: str) -> tuple[Any, torch.Tensor]:
    """The layer's `part` with a random weight of that format; what that stands for."""
    torch.manual_seed(0)
    config = model_configs.vllm_config(heads=2)
    FORMATS[name].take(config, leave_out=[])
    as_loaded = layout.module("vllm.utils.torch_utils").set_default_torch_dtype
    with as_loaded(torch.bfloat16):
        layer = model_layers.attention_layer(config, 0)
    built = getattr(layer_parts.projecting(layer), part)
    columns, size = built.output_size, built.input_size
    with model_configs.current(config):
        weight = packed_formats.load(FORMATS[name], built, columns, size)
    return built, weight


@pytest.mark.parametrize("name", NAMES)
def test_it_is_loaded_in_bf16(name: str) -> None:
    built, weight = loaded(name, "wo_a")
    assert built.weight.dtype == torch.bfloat16, "its owner multiplies packed weights"
    error = (built.weight.cpu().double() - weight).abs().max() / weight.abs().max()
    assert error <= 2**-8, f"a weight is off by {error:.4f} of the largest"
    assert set(dict(built.named_parameters())) == {"weight"}, "packed weights remain"


@pytest.mark.unchanged
@pytest.mark.parametrize("name", layout.PACKED_FORMATS)
def test_other_layers_stay_packed(name: str) -> None:
    built, _ = loaded(name, "wo_b")
    bits = [p.numel() * p.element_size() * 8 for p in built.parameters()]
    assert max(bits) == 4 * built.output_size * built.input_size
