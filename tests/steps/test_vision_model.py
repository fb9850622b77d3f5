# SPDX-License-Identifier: Apache-2.0
"""V4 Vision is the multimodal model that all platforms share, with XPU's text model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layout, model_configs

ARCHITECTURE = "DeepseekV4ForConditionalGeneration"
SERVED = {"dtype": "bfloat16", "block_size": 256, "kv_cache_dtype": "fp8"}


REGISTRY = "vllm.model_executor.models.registry"


def configured(
    folder: Path, fields: dict[str, Any] = model_configs.VISION, **options: Any
) -> Any:
    registry = layout.module(REGISTRY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        return model_configs.engine_config(folder, fields, **SERVED | options)


def built(folder: Path, architecture: str = ARCHITECTURE, **options: Any) -> Any:
    config = configured(folder, **options)
    kind = layout.module(REGISTRY).ModelRegistry.models[architecture].load_model_cls()
    utilities = layout.module("vllm.utils.torch_utils")
    with (
        model_configs.current(config),
        layout.worker(),
        utilities.set_default_torch_dtype(torch.bfloat16),
    ):
        return kind(vllm_config=config)


def end_of_start(folder: Path, **options: Any) -> Any:
    try:
        return built(folder, **options)
    except Exception as error:
        pytest.fail(f"the start ends with {type(error).__name__}: {error}")


def test_the_tower_is_beside_the_text_model(tmp_path: Path) -> None:
    model = end_of_start(tmp_path)
    text = type(model.language_model)
    assert text is layout.module(layout.MODEL).DeepseekV4ForCausalLM
    assert len(model.vision.blocks) == model_configs.VISION["vision_n_layers"]


def test_a_server_without_images_has_no_tower(tmp_path: Path) -> None:
    model = end_of_start(tmp_path, limit_mm_per_prompt={"image": 0})
    assert model.vision is None and model.aligner is None


def test_published_tensors_arrive(tmp_path: Path) -> None:
    """Those of tower, aligner, image parts and routers, under their published names."""
    model = end_of_start(tmp_path)
    wide = model_configs.VISION["vision_dim"]
    published = {
        "vision.patch_embed.proj.weight": (wide, 3 * 14 * 14),
        "vision.blocks.1.attn.wqkv.weight": (3 * wide, wide),
        "vision.blocks.1.mlp.w1.weight": (2 * 256, wide),
        "vision.norm.weight": (wide,),
        "aligner.w1.weight": (256, 9 * wide),
        "image_start": (256,),
        "layers.1.ffn.gate.bias": (4,),
        "layers.1.ffn.gate.bias_vl": (4,),
    }
    renamed = {"layers.1.ffn.gate.bias": "layers.1.ffn.gate.e_score_correction_bias"}
    tensors = {name: torch.randn(*shape) for name, shape in published.items()}
    model.load_weights(tensors.items())
    found = dict(model.named_parameters())
    for name, values in tensors.items():
        name = renamed.get(name, name)
        inside = f"language_model.model.{name}" if name.startswith("layers.") else name
        got = found[inside]
        torch.testing.assert_close(got.cpu().float(), values.to(got.dtype).float())


@pytest.mark.unchanged
def test_the_text_model_stays() -> None:
    registry = layout.module(REGISTRY).ModelRegistry
    text = registry.models["DeepseekV4ForCausalLM"].load_model_cls()
    assert text is layout.module(layout.MODEL).DeepseekV4ForCausalLM
