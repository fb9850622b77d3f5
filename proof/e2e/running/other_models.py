# SPDX-License-Identifier: Apache-2.0
"""Tiny models of other kinds than DeepSeek-V4, with random weights, as Hugging Face
writes them, and what is asked of them."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

VOCABULARY = 256
IMAGE = 255
"""The token that stands for a part of an image."""
SIDE = 28
"""Of an image, in pixels."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
STATES = {"n_heads": 8, "d_head": 32, "d_state": 16, "n_groups": 1, "chunk_size": 32}
"""Of recurrent layers."""
LENGTHS = (40, 5, 1)
WEIGHT = 0.2
"""The standard deviation of weights: so large that tokens differ."""
RANK = 8
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def text_without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in TEXT.items() if name not in names}


def granite() -> Any:
    """A layer with a state that each step moves on, then one of attention."""
    return transformers.GraniteMoeHybridConfig(
        **text_without("head_dim"),
        **{f"mamba_{name}": value for name, value in STATES.items()},
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=128,
    )


def mamba2() -> Any:
    return transformers.Mamba2Config(
        **{name: TEXT[name] for name in TEXT if name.endswith("_id")},
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=STATES["n_heads"],
        head_dim=STATES["d_head"],
        state_size=STATES["d_state"],
        n_groups=STATES["n_groups"],
        chunk_size=STATES["chunk_size"],
    )


def blip2() -> Any:
    """A tower and queries of it in front of a dense model."""
    part = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return transformers.Blip2Config(
        vision_config={**part, "image_size": SIDE, "patch_size": 14},
        qformer_config={
            **part,
            "vocab_size": VOCABULARY,
            "encoder_hidden_size": 128,
            "cross_attention_frequency": 1,
        },
        text_config={
            **text_without("head_dim", "num_key_value_heads", "intermediate_size"),
            "model_type": "opt",
            "ffn_dim": 256,
            "word_embed_proj_dim": 128,
        },
        num_query_tokens=4,
        image_token_index=IMAGE,
    )


@dataclass(frozen=True)
class Model:
    """A kind of model: its class and configuration in transformers, and what the engine
    is told."""

    kind: str
    name: str
    config: Callable[[], Any]
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    pooling: bool = False
    adapter: bool = False
    image: bool = False

    def order(self, folder: Path) -> dict[str, Any]:
        """What `other_engine` reads."""
        own = random.Random(0)
        prompts = [[own.randrange(2, IMAGE) for _ in range(n)] for n in LENGTHS]
        told = asdict(self)
        del told["config"]
        adapter = str(folder / "adapter") if self.adapter else ""
        return {**told, "folder": str(folder), "prompts": prompts, "adapter": adapter}

    def write(self, folder: Path) -> Path:
        """Write configuration, weights, tokenizer, and adapter or processor."""
        torch.manual_seed(0)
        made = getattr(transformers, self.name)(self.config())
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=WEIGHT)
        made.to(torch.bfloat16).save_pretrained(folder)
        write_tokenizer(folder, self.image)
        if self.adapter:
            write_adapter(folder / "adapter", made)
        return folder


def write_tokenizer(folder: Path, image: bool) -> None:
    """A word for each token; for images, a processor too."""
    words = {f"w{i}": i for i in range(IMAGE)} | {"<image>": IMAGE}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w2"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="w0",
        pad_token="w1",
        extra_special_tokens={"image_token": "<image>"},
    )
    tokenizer.save_pretrained(folder)
    if image:
        size = {"height": SIDE, "width": SIDE}
        pixels = transformers.BlipImageProcessorPil(size=size)
        transformers.Blip2Processor(pixels, tokenizer, 4).save_pretrained(folder)


def write_adapter(folder: Path, model: Any) -> None:
    """A low-rank change of the queries and of an expansion in each layer."""
    folder.mkdir()
    targets = ["q_proj", "up_proj"]
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": torch.randn(size) * WEIGHT
        for name, layer in model.named_modules()
        if name.endswith(tuple(targets))
        for part, size in (
            ("A", (RANK, layer.in_features)),
            ("B", (layer.out_features, RANK)),
        )
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    described |= {"target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))


def qwen3() -> Any:
    return transformers.Qwen3Config(**TEXT)


def qwen3_experts() -> Any:
    return transformers.Qwen3MoeConfig(**TEXT, **EXPERTS)


def bert() -> Any:
    return transformers.BertConfig(**text_without("head_dim", "num_key_value_heads"))


DENSE = "Qwen3ForCausalLM"
SEEING_CLASS = "Blip2ForConditionalGeneration"
POOLING = {"runner": "pooling"}
ADAPTED = {"enable_lora": True, "max_lora_rank": RANK}
SEEING = {"limit_mm_per_prompt": {"image": 1}, "mm_processor_cache_gb": 0}
MODELS = {
    model.kind: model
    for model in (
        Model("dense", DENSE, qwen3),
        Model("experts", "Qwen3MoeForCausalLM", qwen3_experts),
        Model("hybrid", "GraniteMoeHybridForCausalLM", granite),
        Model("recurrent", "Mamba2ForCausalLM", mamba2),
        Model("adapter", DENSE, qwen3, ADAPTED, adapter=True),
        Model("images", SEEING_CLASS, blip2, SEEING, image=True),
        Model("pooling", DENSE, qwen3, POOLING | {"convert": "embed"}, pooling=True),
        # The second runner has a buffer of no values there, which it makes on "xpu".
        Model("encoder", "BertModel", bert, POOLING, V1, pooling=True),
    )
}
"""By what kind of model it is."""
