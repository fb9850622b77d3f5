# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of DeepSeek-V4 Vision: a tower, an aligner, the vectors of an image's
other parts, and a second bias in each router, beside Flash with DSpark's draft."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from proof.e2e import pictures
from proof.e2e.checkpoints import checkpoint, dspark

WIDTH = 128
HEADS = 2
INNER = 256
LAYERS = 2
THETA = 10_000.0
MOST = 160
"""Tokens of the largest image: more than the window has."""
TOWER = {
    "vision_n_layers": LAYERS,
    "vision_dim": WIDTH,
    "vision_n_heads": HEADS,
    "vision_inter_dim": INNER,
    "vision_patch_size": pictures.PATCH,
    "vision_rope_theta": THETA,
    "vision_downsample_ratio": pictures.MERGED,
    "vision_max_n_token": MOST,
    "vision_min_pixels": 2 * pictures.PATCH**2,
    "vision_max_wh_ratio": 8,
}
ENGINE = (
    ("skip_tokenizer_init", False),
    ("max_num_batched_tokens", MOST + 16),
    ("kv_cache_memory_bytes", 64 << 20),
)
"""A step takes the largest image and a little text."""
PARTS = ("image_start", "image_pad", "image_newline", "image_end")


class Vision(dspark.DSpark):
    """Writes DeepSeek's formats and the tower, which no part of is quantized."""

    size = checkpoint.Size(vocabulary=129_280)

    def __init__(self, seed: int, successors: Mapping[int, int] | None = None) -> None:
        super().__init__(seed, successors or {})
        write_tower(self, PARTS)

    def described(self) -> dict[str, Any]:
        stages = {"num_nextn_predict_layers": dspark.STAGES}
        return super().described() | TOWER | stages

    def router(self, layer: str, hashed: bool) -> None:
        super().router(layer, hashed)
        if hashed:
            bias = self.random(self.size.experts, std=0.3)
            self.plain(f"{layer}.ffn.gate.bias", bias, torch.float32)
        self.lifting_bias(f"{layer}.ffn.gate.bias_vl")

    def known_to_twin(self, name: str) -> bool:
        hashed = [f"layers.{n}.ffn.gate.bias" for n in range(self.size.hashed)]
        own = name.startswith(("vision.", "aligner.", "image_"))
        own |= name.endswith(".bias_vl") or name in hashed
        return super().known_to_twin(name) and not own

    def special_tokens(self) -> dict[str, int]:
        parts = {
            f"<|place_holder_mm_span_{431 + part:04}|>": pictures.SENTINELS + part
            for part in range(5)
        }
        return {pictures.PLACEHOLDER_TEXT: pictures.PLACEHOLDER} | parts


class StagedVision(Vision):
    """Six layers: two pipeline stages with every kind of layer."""

    size = replace(Vision.size, ratios=(0, 4, 128, 4, 128, 4))


def write_tower(writer: checkpoint.Writer, parts: Iterable[str]) -> None:
    """Write tower and aligner, and the vectors of an image's other `parts`."""
    for name, shape in tower_shapes(writer.size.hidden).items():
        mean = 1.0 if "norm" in name else 0.0
        std = 0.1 if len(shape) == 1 else 2.0 * shape[1] ** -0.5
        writer.plain(name, writer.random(*shape, std=std, mean=mean))
    for name in parts:
        writer.plain(name, writer.random(writer.size.hidden))


def tower_shapes(
    hidden: int, width: int = WIDTH, inner: int = INNER, layers: int = LAYERS
) -> dict[str, tuple[int, ...]]:
    """The tensors of tower and aligner, by their published names."""
    merged = width * pictures.MERGED**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, 3 * pictures.PATCH**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, merged),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
    }
    for number in range(layers):
        block = f"vision.blocks.{number}"
        shapes |= {
            f"{block}.norm1.weight": (width,),
            f"{block}.attn.wqkv.weight": (3 * width, width),
            f"{block}.attn.wqkv.bias": (3 * width,),
            f"{block}.attn.wo.weight": (width, width),
            f"{block}.attn.wo.bias": (width,),
            f"{block}.norm2.weight": (width,),
            f"{block}.mlp.w1.weight": (2 * inner, width),
            f"{block}.mlp.w2.weight": (width, inner),
        }
    return shapes
