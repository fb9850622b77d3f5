# SPDX-License-Identifier: Apache-2.0
"""V4.1 on XPU has the tower, an image's parts and the second bias of its routers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layout, v41

WIDE, HIDDEN, EXPERTS = v41.TOWER["hidden_size"], 256, 4


def end_of_start(folder: Path, images: int) -> Any:
    config = v41.configured(folder, limit_mm_per_prompt={"image": images})
    return v41.built(config)


def test_published_tensors_arrive(tmp_path: Path) -> None:
    """Under their published names, beside the text model."""
    try:
        model = end_of_start(tmp_path, images=1)
    except ValueError as error:
        pytest.fail(str(error))
    published = {
        "vision.patch_embed.proj.weight": (WIDE, 3 * 14 * 14),
        "vision.blocks.0.attn.wqkv.weight": (3 * WIDE, WIDE),
        "vision.norm.weight": (WIDE,),
        "aligner.w1.weight": (HIDDEN, 9 * WIDE),
        "image_start": (HIDDEN,),
        "image_newline": (HIDDEN,),
        "image_end": (HIDDEN,),
        "layers.1.ffn.gate.bias_vl": (EXPERTS,),
    }
    tensors = {name: torch.randn(*shape) for name, shape in published.items()}
    model.load_weights(tensors.items())
    found = dict(model.named_parameters())
    for name, values in tensors.items():
        inside = f"language_model.model.{name}" if name.startswith("layers.") else name
        got = found[inside]
        torch.testing.assert_close(got.cpu().float(), values.to(got.dtype).float())


def test_images_need_not_stay_whole(tmp_path: Path) -> None:
    """Unlike V4's, whose tokens see all of their image."""
    try:
        config = v41.configured(tmp_path, limit_mm_per_prompt={"image": 1})
    except ValueError as error:
        pytest.fail(str(error))
    assert not config.model_config.is_mm_prefix_lm


@pytest.mark.unchanged
def test_a_server_without_images_has_no_tower(tmp_path: Path) -> None:
    model = end_of_start(tmp_path, images=0)
    assert not [name for name, _ in model.named_parameters() if "vision" in name]


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_keep_their_multimodal_model() -> None:
    model = layout.module("vllm.models.deepseek_v41.nvidia.vl_model")
    kind = model.DeepseekV41ForCausalLM
    assert kind.language_model_cls is model.DeepseekV41LLMForCausalLM
