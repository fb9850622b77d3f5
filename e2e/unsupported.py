# SPDX-License-Identifier: Apache-2.0
"""The configurations of models that are more than DeepSeek-V4, as published.

DeepSeek-V4.1 nests its text model and its vision tower, and no release of vLLM that
lacks it knows the type: only its configuration is written.
"""

import json
from pathlib import Path
from typing import Any

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


CONFIGURATIONS = {"v4.1": _v41}


def write(folder: Path, name: str) -> Path:
    """Write the configuration and the tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGURATIONS[name]()))
    checkpoint.write_tokenizer(folder)
    return folder
