# SPDX-License-Identifier: Apache-2.0
"""Attention is built for a quantization that names no format of its scales."""

from typing import Any

import pytest
from helpers import model_configs, model_layers

LINEARS = ["wo_a", "wo_b", "wq_b", "fused_wqa_wkv", "fused_wkv_wgate", "weights_proj"]


def auto_round() -> Any:
    """A checkpoint whose own description is AutoRound's."""
    config = model_configs.vllm_config()
    model_configs.take_auto_round(config, LINEARS)
    described = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
    config.model_config.hf_config.quantization_config = described
    return config


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_auto_round_names_no_format(ratio: int) -> None:
    layer = model_layers.attention_layer(auto_round(), ratio)
    assert layer.compress_ratio == max(ratio, 1)


@pytest.mark.unchanged
def test_deepseeks_own_format() -> None:
    config = model_configs.vllm_config(quantized=True)
    assert model_layers.attention_layer(config, 4).compress_ratio == 4
