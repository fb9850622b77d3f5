# SPDX-License-Identifier: Apache-2.0
"""The tensors of a published checkpoint, without their values: each is one zero that
all its elements share."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lab.memory import FLASH, PRO
from proof.e2e.checkpoints import checkpoint, dspark, v41, vision

MODELS = {"flash": FLASH, "pro": PRO}
LENGTH = 1 << 20
"""Tokens of context that both models are trained for."""
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""By their names in the headers of safetensors."""

UNREAD = ("mtp.", "vision.", "aligner.", "image_")
"""How tensors of a draft, and of images, begin: a server of text needs none."""

Tensors = Mapping[str, torch.Tensor]


class Incomplete(ValueError):
    """A checkpoint lacks a tensor, or has another than its model takes."""


def size(name: str) -> checkpoint.Size:
    """The size of "flash" or "pro"."""
    model = MODELS[name]
    return checkpoint.Size(
        ratios=model.ratios,
        hashed=model.hashed,
        hidden=model.hidden,
        heads=model.heads,
        groups=model.groups,
        q_lora=model.q_lora,
        o_lora=model.o_lora,
        intermediate=model.width,
        experts=model.experts,
        index_topk=model.topk,
        chosen=model.active,
        vocabulary=model.vocabulary,
        length=LENGTH,
    )


class WithoutValues(checkpoint.Writer):
    """Collects names, types and shapes alone."""

    def random(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def choice(self, rows: int, count: int, of: int) -> torch.Tensor:
        return torch.empty(rows, count, dtype=torch.int64, device="meta")

    def plain(
        self, name: str, values: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.published[name] = zeros(dtype, values.shape)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        block = self.block
        scales = -(-rows // block), -(-columns // block)
        self.published[f"{name}.weight"] = zeros(torch.float8_e4m3fn, (rows, columns))
        self.published[f"{name}.scale"] = zeros(torch.float8_e8m0fnu, scales)

    def mxfp4(self, name: str, rows: int, columns: int, gain: float) -> None:
        scales = rows, columns // checkpoint.MXFP4_BLOCK
        self.published[f"{name}.weight"] = zeros(torch.int8, (rows, columns // 2))
        self.published[f"{name}.scale"] = zeros(torch.float8_e8m0fnu, scales)

    def _quantized(self, name: str, weight: checkpoint.Quantized) -> None:
        for part, of in (("weight", weight.codes), ("scale", weight.scale)):
            self.published[f"{name}.{part}"] = zeros(of.dtype, of.shape)


class Writer(WithoutValues):
    """Flash, Pro, or what a configuration says."""

    def __init__(self, size: checkpoint.Size) -> None:
        super().__init__(0)
        self.size = size


class WithDSpark(WithoutValues, dspark.DSpark):
    """The same with DSpark's draft."""

    stages = 3
    target_layers = (40, 41, 42)

    def __init__(self, size: checkpoint.Size, config: Mapping[str, Any]) -> None:
        self.size = size
        self.stages = config.get("num_nextn_predict_layers", self.stages)
        self.target_layers = config.get("dspark_target_layer_ids", self.target_layers)
        super().__init__(0, {})


class Vision(WithoutValues, vision.Vision):
    """V4 Vision: DSpark's draft and a tower beside Flash."""

    stages = 3
    target_layers = (40, 41, 42)

    def __init__(self, size: checkpoint.Size, config: Mapping[str, Any]) -> None:
        self.size, self.tower = (
            size,
            TOWER
            | {
                name: config[f"vision_{name}"]
                for name in TOWER
                if f"vision_{name}" in config
            },
        )
        self.stages = config.get("num_nextn_predict_layers", self.stages)
        self.target_layers = config.get("dspark_target_layer_ids", self.target_layers)
        super().__init__(0)
        write_tower(self, self.tower)

    def described(self) -> dict[str, Any]:
        known = {f"vision_{name}": value for name, value in self.tower.items()}
        return super().described() | known | {"num_nextn_predict_layers": self.stages}


class V41(WithoutValues, v41.V41):
    """V4.1-Flash."""

    size = checkpoint.Size(
        ratios=(0,) * 2 + (2,) * 18 + (1,) * 20,
        hashed=0,
        hidden=5120,
        heads=64,
        groups=8,
        q_lora=1280,
        o_lora=1024,
        intermediate=2304,
        experts=384,
        index_topk=512,
        chosen=6,
        vocabulary=129_280,
        length=LENGTH,
    )
    stages = 3
    kv_sources = (2, 8, 14, 20)
    index_sources = (2, 8, 14, 20, 24, 28, 32, 36)
    candidates = 20, 2048
    target_layers = (37, 38, 39)
    engram_layers = (1, 14)
    engram_dim = 256
    engram_rows = 16_000_000
    draft_experts = 128, 3

    def __init__(self, seed: int = 0, tower: Mapping[str, int] = {}) -> None:
        self.tower = {**TOWER, **tower}
        super().__init__(seed)
        write_tower(self, self.tower)

    def config(self) -> dict[str, Any]:
        found = super().config()
        named = {NAMES_V41[name]: value for name, value in self.tower.items()}
        return found | {"vision_config": found["vision_config"] | named}

    def texts(self) -> list[str]:
        """Those of the small tokenizer that `published` writes."""
        return v41.texts(checkpoint.VOCABULARY)


class V41Of(V41):
    """What a configuration of V4.1 says."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config["text_config"]
        self.size = size_of({**text, "num_hash_layers": 0})
        self.kv_sources = tuple(text["kv_source_layer_ids"])
        self.index_sources = tuple(text["index_source_layer_ids"])
        self.engram_layers = tuple(text["engram_layer_ids"])
        self.engram_dim = text["engram_head_dim"]
        self.engram_rows = text["engram_vocab_size"]
        self.stages = text.get("num_nextn_predict_layers", self.stages)
        self.target_layers = text.get("dspark_target_layer_ids", self.target_layers)
        self.draft_experts = (
            text.get("dspark_n_routed_experts", self.draft_experts[0]),
            text.get("dspark_num_experts_per_tok", self.draft_experts[1]),
        )
        seen = config.get("vision_config") or {}
        super().__init__(
            tower={name: seen[of] for name, of in NAMES_V41.items() if of in seen}
        )


TOWER = {"dim": 1024, "inter_dim": 2816, "n_layers": 32, "n_heads": 16}
"""Of an image's encoder: its depth from the number of published tensors, the rest what
vLLM v0.33.0 takes where V4.1's configuration says nothing."""
NAMES_V41 = {
    "dim": "hidden_size",
    "inter_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
}
"""What V4.1's `vision_config` calls them."""


def write_tower(writer: checkpoint.Writer, tower: Mapping[str, int]) -> None:
    """Tower and aligner of these sizes in place of the tiny checkpoints'."""
    for name in list(writer.published):
        if name.startswith(("vision.", "aligner.")):
            del writer.published[name]
    of = tower["dim"], tower["inter_dim"], tower["n_layers"]
    for name, shape in vision.tower_shapes(writer.size.hidden, *of).items():
        writer.plain(name, writer.random(*shape))


def writer_of(config: Mapping[str, Any]) -> WithoutValues:
    """What writes the tensors of a configuration in DeepSeek's own form."""
    if "text_config" in config:
        return V41Of(config)
    size = size_of(config)
    if config.get("vision_n_layers"):
        return Vision(size, config)
    if "dspark_block_size" in config:
        return WithDSpark(size, config)
    return Writer(size)


def zeros(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor of one zero byte pattern, which takes the memory of one element."""
    shape = tuple(shape)
    one = torch.zeros((1,) * len(shape), dtype=torch.uint8, device="cpu")
    if dtype.itemsize == 1:
        return one.view(dtype).expand(shape)
    return one.to(dtype).expand(shape)


def known(job: Mapping[str, Any], folder: Path) -> Tensors:
    """The tensors of what a job plans. A published model's configuration is written to
    `folder`, which for another one has it.

    Raises:
        Incomplete: the folder's checkpoint lacks a tensor.
    """
    if not job["model"] and not job["config"]:
        return listed(str(folder), job["tensors"])
    if job["model"]:
        config, tensors = published(job["model"], folder)
    else:
        config, tensors = described(json.loads(job["config"]), folder)
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def published(name: str, folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Configuration and tensors of a published model. A tokenizer, of which the hashes
    of V4.1 are made, goes to `folder`: a small one."""
    writer: WithoutValues
    if name == "v4.1":
        writer = V41()
    elif name == "vision":
        writer = Vision(size("flash"), {})
    else:
        writer = Writer(size(name))
    if name in ("v4.1", "vision"):
        writer.write_tokenizer(folder)
    checkpoint.whole_model(writer)
    return writer.config(), writer.published


def described(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Tensors]:
    """The same of a configuration alone. V4.1's tables have the rows that follow from
    the small tokenizer, some thousandths more or fewer than from its own."""
    writer = writer_of(config)
    if isinstance(writer, V41 | Vision):
        writer.write_tokenizer(folder)
    checkpoint.whole_model(writer)
    if isinstance(writer, V41):
        known = writer.config()["text_config"]
        text = {name: known[name] for name in known if name.startswith("engram_")}
        config = config | {"text_config": config["text_config"] | text}
    return config, writer.published


def listed(folder: str, rows: Iterable[tuple[str, str, list[int]]]) -> Tensors:
    """The tensors that a checkpoint's headers list: name, type and shape.

    Raises:
        Incomplete: it is in DeepSeek's own form, and lacks a tensor of the model.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    found = {name: zeros(DTYPES[kind], shape) for name, kind, shape in rows}
    if config.get("quantization_config", {}).get("quant_method") == "fp8":
        writer = writer_of(config)
        checkpoint.whole_model(writer)
        for name in writer.published:
            if name not in found and not name.startswith(UNREAD):
                raise Incomplete(f"the checkpoint has no {name}")
    return found


def size_of(config: Mapping[str, Any]) -> checkpoint.Size:
    """What a checkpoint's configuration says."""
    return checkpoint.Size(
        ratios=tuple(config["compress_ratios"][: config["num_hidden_layers"]]),
        hashed=config["num_hash_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        groups=config["o_groups"],
        q_lora=config["q_lora_rank"],
        o_lora=config["o_lora_rank"],
        intermediate=config["moe_intermediate_size"],
        experts=config["n_routed_experts"],
        chosen=config["num_experts_per_tok"],
        vocabulary=config["vocab_size"],
    )


def text_config(folder: Path) -> dict[str, Any]:
    """What the configuration in a folder says of the language model."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return dict(config.get("text_config") or config)


def loadable(
    tensors: Tensors, config: Mapping[str, Any], drafting: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a loader must see: the draft if there is one, and of the experts of a layer
    the first and the last; those between must be like the first.

    Raises:
        Incomplete: a layer lacks a tensor of an expert, or one has another type or
            shape than the first.
    """
    kinds: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name.startswith("mtp.") and not drafting:
            continue
        layer, found, rest = name.partition(".experts.")
        if not found:
            yield name, tensor
            continue
        expert, _, part = rest.partition(".")
        kinds[f"{layer}.experts.*.{part}"][int(expert)] = tensor
    for kind, of in kinds.items():
        experts = config["n_routed_experts"]
        if kind.startswith("mtp."):
            experts = config.get("dspark_n_routed_experts") or experts
        for number in range(experts):
            _like_the_first(kind.replace("*", str(number)), number, of)
        for number in {0, experts - 1}:
            yield kind.replace("*", str(number)), of[number]


def _like_the_first(name: str, number: int, of: Mapping[int, torch.Tensor]) -> None:
    if number not in of:
        raise Incomplete(f"the checkpoint has no {name}")
    first, tensor = of[0], of[number]
    if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
        raise Incomplete(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expert 0 has"
            f" {first.dtype} {tuple(first.shape)}"
        )
