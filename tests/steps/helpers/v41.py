# SPDX-License-Identifier: Apache-2.0
"""A small DeepSeek-V4.1: its configuration as a checkpoint has it, and its model."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from . import layout, model_configs

ARCHITECTURE = "DeepseekV41ForCausalLM"
REGISTRY = "vllm.model_executor.models.registry"
TEXT = {
    "compress_ratios": [0, 2, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 8,
    "num_hidden_layers": 4,
    "index_n_heads": 32,
    "index_topk": 16,
    "vocab_size": 129_280,
    "rms_norm_eps": 1e-20,
}
TOWER = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "patch_size": 14,
    "rope_theta": 10_000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 160,
    "min_pixels": 0,
    "max_wh_ratio": 8,
}
SERVED = {"dtype": "bfloat16", "limit_mm_per_prompt": {"image": 0}}


def fields(**text: Any) -> dict[str, Any]:
    """What `config.json` holds, with these fields of the text model."""
    with tempfile.TemporaryDirectory() as folder:
        model_configs.write_config(Path(folder))
        v4 = json.loads((Path(folder) / "config.json").read_text())
    packing = v4.pop("quantization_config")
    packing |= {"weight_block_size": [32, 32], "expert_dtype": v4.pop("expert_dtype")}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v41",
        "image_token_id": 129_264,
        "text_config": v4 | TEXT | text,
        "vision_config": TOWER,
        "quantization_config": packing,
    }


def configured(folder: Path, text: dict[str, Any] | None = None, **options: Any) -> Any:
    """The configuration of a server, as `EngineArgs` makes it."""
    (folder / "config.json").write_text(json.dumps(fields(**text or {})))
    arguments = layout.module("vllm.engine.arg_utils").EngineArgs
    served = {"skip_tokenizer_init": True, "max_model_len": 512} | SERVED | options
    registry = layout.module(REGISTRY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        return arguments(model=str(folder), **served).create_engine_config()


def built(config: Any) -> Any:
    kind = layout.module(REGISTRY).ModelRegistry.models[ARCHITECTURE].load_model_cls()
    utilities = layout.module("vllm.utils.torch_utils")
    with (
        model_configs.current(config),
        layout.worker(),
        utilities.set_default_torch_dtype(torch.bfloat16),
    ):
        return kind(vllm_config=config)
