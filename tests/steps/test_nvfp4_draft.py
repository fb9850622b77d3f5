# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of NVIDIA's has the draft's experts in MXFP4, the model's in NVFP4."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers

BYTES = 121
"""An exponent as a byte: 2^-6."""


KEPT: list[dict[str, Any]] = [
    {"ignore": ["*.attn.*", "mtp.*"]},
    {"ignore": ["mtp.0*"]},
    {"ignore": [r"re:mtp\..*"]},
    {"ignore": ["*mtp*"]},
    {"ignore": ["mtp.0.ffn.experts*"]},
    {"ignore": ["model.mtp*"]},
    {"ignore": ["re:.*mtp.*"]},
    {"ignore": [r"re:mtp\.0\.ffn\.experts\.\d+\.w[123]"]},
    {"exclude_modules": ["mtp*"]},
    {"quantization": {"exclude_modules": ["mtp*"]}},
]
"""What says that the draft's experts were not converted."""
CONVERTED: list[dict[str, Any]] = [
    {},
    {"ignore": ["*.attn.*"]},
    {"ignore": ["mtp.1.*"]},
    {"ignore": ["mtp.0.attn*"]},
    {"exclude_modules": ["layers.0.ffn.experts*"]},
]


def config(described_also: dict[str, Any]) -> Any:
    """The model's experts are in NVFP4; `described_also` names what was not
    converted."""
    made = model_configs.vllm_config(speculative_tokens=1, quantized=True)
    described = made.model_config.hf_config.quantization_config
    described |= {"moe_quant_algo": "NVFP4"} | described_also
    kind = layout.module(layout.QUANTIZATION).DeepseekV4FP8Config
    made.quant_config = kind.from_config(described)
    return made


def experts_of(block: Any) -> Any:
    """The module that has the experts' parameters."""
    return next(m for m in block.modules() if hasattr(m, "w13_weight_scale"))


def block(described: dict[str, Any]) -> tuple[Any, Any]:
    draft = model_layers.draft_model(config(described))
    (layer,) = draft.model.layers.values()
    return draft, layer.mtp_block


def exponents_of(scale: torch.Tensor) -> torch.Tensor:
    """Scales of one projection of an expert, as published beside MXFP4."""
    rows, columns = scale.shape[1] // 2, scale.shape[2]
    exponents = torch.full((rows, columns), BYTES, dtype=torch.uint8)
    return exponents.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("described", KEPT, ids=str)
def test_the_scales_of_a_draft_keep_their_exponents(described: dict[str, Any]) -> None:
    draft, layer = block(described)
    scale = experts_of(layer).w13_weight_scale
    assert not hasattr(experts_of(layer), "w13_weight_scale_2"), (
        "the draft's experts are read as NVFP4"
    )
    published = exponents_of(scale)
    draft.load_weights([("mtp.0.ffn.experts.0.w1.scale", published)])
    loaded = scale[0].cpu().view(torch.uint8)
    rows = len(published)
    assert (loaded[:rows] == BYTES).all() or (loaded[rows:] == BYTES).all()


@pytest.mark.unchanged
@pytest.mark.parametrize("described", CONVERTED, ids=str)
def test_a_draft_that_was_converted(described: dict[str, Any]) -> None:
    """Its layer takes NVFP4."""
    _, layer = block(described)
    assert experts_of(layer).w13_weight_scale_2 is not None


@pytest.mark.unchanged
def test_the_layers_of_the_model() -> None:
    model = layout.module(layout.MODEL)
    made = config(KEPT[0])
    with model_configs.current(made), layout.worker():
        experts = model.DeepseekV4MoE(made, prefix="model.layers.1.ffn")
    assert experts_of(experts).w13_weight_scale_2 is not None


@pytest.mark.unchanged
def test_a_draft_without_a_quantization() -> None:
    made = config(KEPT[0])
    made.quant_config = None
    (layer,) = model_layers.draft_model(made).model.layers.values()
    assert layer.mtp_block is not None
