# SPDX-License-Identifier: Apache-2.0
"""The configurations of models that are more than DeepSeek-V4, as published.

DeepSeek-V4.1 nests its text model and its vision tower, and no release of vLLM that
lacks it knows the type: only its configuration is written. V4 Vision has the tower's
fields and tensors beside those of Flash, for which an older release may take it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from e2e import checkpoint

TOWER = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "patch_size": 14,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
}


def _v41() -> dict[str, Any]:
    text = checkpoint.config()
    packing = text.pop("quantization_config")
    text["model_type"] = "deepseek_v41_text"
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": text.pop("torch_dtype"),
        "text_config": text,
        "vision_config": TOWER,
        "quantization_config": packing | {"expert_dtype": text.pop("expert_dtype")},
    }


def _vision() -> dict[str, Any]:
    tower = {
        "vision_n_layers": 2,
        "vision_dim": 64,
        "vision_n_heads": 4,
        "vision_inter_dim": 128,
        "vision_patch_size": 14,
        "vision_downsample_ratio": 3,
    }
    architecture = {"architectures": ["DeepseekV4ForConditionalGeneration"]}
    return checkpoint.config() | architecture | tower


CONFIGURATIONS = {"v4.1": _v41, "vision": _vision}


def write(folder: Path, name: str, flash: Path) -> Path:
    """Write the configuration and the tokenizer; V4 Vision with the tensors of `flash`
    and a few of its tower."""
    folder.mkdir()
    if name == "vision":
        tensors = dict(checkpoint.tensors(flash))
        for part in ("vision.norm.weight", "aligner.weight"):
            tensors[part] = torch.ones(TOWER["hidden_size"], dtype=torch.bfloat16)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGURATIONS[name]()))
    checkpoint.write_tokenizer(folder)
    return folder
