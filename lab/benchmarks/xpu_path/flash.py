# SPDX-License-Identifier: Apache-2.0
"""Models with the attention of DeepSeek-V4-Flash or V4.1-Flash, few experts, few
layers, and random weights that are made on the device."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

FORMAT = "random_on_device"
RATIOS = (0, 4, 128, 4, 128, 4)
EXPERTS = 8
CACHE_SCALES = ("k_scale", "q_scale", "v_scale", "prob_scale")
"""Left at what vLLM gives them: the pages have scales of their own."""
CODE_SCALE, NIBBLE_SCALE = 121, 119
"""Exponents of all scales, 127 more: a sum of 4,096 products stays near one."""


V41_SIZES = {
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "moe_intermediate_size": 2304,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1 << 17,
}


def long_rope(tiny: dict[str, Any]) -> dict[str, Any]:
    """Tables of RoPE for longer prompts than the tiny checkpoints': those of the
    compressed layers have as many rows as the product of both numbers."""
    return {**tiny, "factor": 16, "original_max_position_embeddings": 1 << 16}


def write_v41(folder: Path, published: Path, changed: dict[str, Any]) -> Path:
    """Write the tiny V4.1 that lies in `published` with V4.1-Flash's sizes, its Engram
    and its tokenizer as they are, and without weights."""
    weights = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(published, folder, ignore=weights, dirs_exist_ok=True)
    config = folder / "config.json"
    described = json.loads(config.read_text())
    text = described["text_config"]
    text["rope_scaling"] = long_rope(text["rope_scaling"])
    text |= V41_SIZES | changed
    config.write_text(json.dumps(described))
    return folder


def write_config(folder: Path, tiny: dict[str, Any], changed: dict[str, Any]) -> Path:
    """Write `config.json` of the model: the tiny checkpoint's with Flash's sizes."""
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 4096,
        "num_hidden_layers": len(RATIOS),
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "compress_ratios": list(RATIOS),
        "index_topk": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1 << 17,
        "rope_scaling": long_rope(tiny["rope_scaling"]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    described = {**tiny, **sizes, **changed}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@register_model_loader(FORMAT)
class RandomOnDevice(BaseModelLoader):
    """Fills every parameter where it lies."""

    def download_model(self, model_config: Any) -> None:
        """Nothing is downloaded."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        experts = model_config.hf_text_config.n_routed_experts
        generators: dict[torch.device, torch.Generator] = {}
        for name, parameter in model.named_parameters():
            device = parameter.device
            # What a class takes from another layer has no memory of its own.
            if parameter.is_meta:
                continue
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(
                    model_config.seed
                )
            if name.rpartition(".")[2] not in CACHE_SCALES:
                fill(name, parameter.data, generators[device], experts)


def fill(
    name: str, values: torch.Tensor, generator: torch.Generator, experts: int
) -> None:
    """Random values of the size that a parameter of that name has in a real model."""

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        return made.normal_(generator=generator)

    leaf = name.rpartition(".")[2]
    if values.dtype == torch.float8_e8m0fnu or (
        values.dtype == torch.uint8 and "scale" in leaf
    ):
        fp4 = ".experts" in name and "shared" not in name
        values.view(torch.uint8).fill_(NIBBLE_SCALE if fp4 else CODE_SCALE)
    elif values.dtype == torch.float8_e4m3fn:
        in_parts(values, lambda part: part.copy_(normal(part)))
    elif not values.is_floating_point() and values.element_size() == 1:
        values.view(torch.uint8).random_(0, 256, generator=generator)
    elif not values.is_floating_point():
        values.random_(0, experts, generator=generator)
    elif "scale" in leaf and "hc" not in leaf:
        values.fill_(2.0 ** (CODE_SCALE - 127))
    elif "sink" in leaf:
        values.copy_(normal(values) * 2 + 2)
    elif "norm" in name or (leaf.startswith("hc_") and values.dim() == 1):
        values.copy_(normal(values) * 0.1 + 1)
    elif values.dim() == 1:
        values.copy_(normal(values))
    else:
        gain = 1.0 if "embed" in name else values.shape[-1] ** -0.5
        in_parts(values, lambda part: part.copy_(normal(part) * gain))


def in_parts(
    values: torch.Tensor, function: Callable[[torch.Tensor], Any], rows: int = 4096
) -> None:
    """Call for some rows at a time: random numbers come in fp32."""
    for part in values.flatten(0, -2).split(rows):
        function(part)
