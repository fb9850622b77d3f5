# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of NVIDIA's has the draft's experts in MXFP4, the model's in NVFP4."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers

BYTES = 121
"""An exponent as a byte: 2^-6."""


def config(*ignore: str) -> Any:
    """The model's experts are in NVFP4; `ignore` names what was not converted."""
    made = model_configs.vllm_config(speculative_tokens=1, quantized=True)
    described = made.model_config.hf_config.quantization_config
    described |= {"moe_quant_algo": "NVFP4", "ignore": ["*.attn.*", *ignore]}
    kind = layout.module(layout.QUANTIZATION).DeepseekV4FP8Config
    made.quant_config = kind.from_config(described)
    return made


def experts_of(block: Any) -> Any:
    """The module that has the experts' parameters."""
    return next(m for m in block.modules() if hasattr(m, "w13_weight_scale"))


def block(ignore: tuple[str, ...]) -> tuple[Any, Any]:
    draft = model_layers.draft_model(config(*ignore))
    (layer,) = draft.model.layers.values()
    return draft, layer.mtp_block


@pytest.mark.parametrize("ignore", ["mtp.*", "mtp.0*", r"re:mtp\..*"])
def test_the_scales_of_a_draft_keep_their_exponents(ignore: str) -> None:
    draft, layer = block((ignore,))
    scale = experts_of(layer).w13_weight_scale
    assert not hasattr(experts_of(layer), "w13_weight_scale_2"), (
        "the draft's experts are read as NVFP4"
    )
    rows, columns = scale.shape[1] // 2, scale.shape[2]
    exponents = torch.full((rows, columns), BYTES, dtype=torch.uint8)
    published = exponents.view(torch.float8_e8m0fnu)
    draft.load_weights([("mtp.0.ffn.experts.0.w1.scale", published)])
    loaded = scale[0].cpu().view(torch.uint8)
    assert (loaded[:rows] == BYTES).all() or (loaded[rows:] == BYTES).all()


@pytest.mark.unchanged
def test_a_draft_that_was_converted() -> None:
    _, layer = block(())
    assert experts_of(layer).w13_weight_scale_2 is not None


@pytest.mark.unchanged
def test_the_layers_of_the_model() -> None:
    model = layout.module(layout.MODEL)
    made = config("mtp.*")
    with model_configs.current(made), layout.worker():
        experts = model.DeepseekV4MoE(made, prefix="model.layers.1.ffn")
    assert experts_of(experts).w13_weight_scale_2 is not None
