# SPDX-License-Identifier: Apache-2.0
"""Models that a plan can be of: published ones by name, and the folder of another, with
its files or, before the download, with `config.json` alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.memory import FLASH, PRO, Model, Shapes
from lab.memory_v41 import FLASH_V41, V41
from stack.core.errors import UsageError


@dataclass(frozen=True)
class Architecture:
    """What a server of it is told.

    Attributes:
        block_size: tokens of a block of the cache.
        parser: of thoughts and tool calls.
        images: whether it takes any.
        needs_tokenizer: to build the model; V4.1's tables of n-grams depend on it, and
            so do the places of images.
    """

    block_size: int
    parser: str
    images: bool = False
    needs_tokenizer: bool = False


V4 = Architecture(256, "deepseek_v4")
OF_VISION = Architecture(256, "deepseek_v4", images=True, needs_tokenizer=True)
OF_V41 = Architecture(128, "deepseek_v41", images=True, needs_tokenizer=True)
LENGTH = 1 << 20
"""Tokens of context that the published models are trained for."""
V41_RATIOS = (0,) * 2 + (2,) * 18 + (1,) * 20
V41_SOURCES, V41_INDEXERS = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36)
V41_CANDIDATES = 20
V41_KEYS = (
    *("compress_ratios", "num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("o_groups", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"),
    *("n_routed_experts", "num_experts_per_tok", "vocab_size"),
    *("kv_source_layer_ids", "index_source_layer_ids"),
    *("engram_layer_ids", "engram_head_dim", "engram_vocab_size"),
    *("candidate_source_layer_id", "max_position_embeddings"),
)
"""What a plan reads of V4.1's `text_config`."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is published.

    Attributes:
        name: of `NAMED`; empty for a folder.
        label: what people call it.
        folder: where it lies; for a published one, where it could.
        groups: output groups, each of which stays on one rank.
        length: tokens of the longest context.
        ratios: of the layers in order; 0 is the window alone.
        writing: layers that write compressed entries.
        begins: layers at which a pipeline stage may begin, but the first stage's.
        anchors: layers of which each stage needs one: without, its ranks want another
            layout of the cache than the others.
        cuts: what both say, for people.
        config: what a folder's `config.json` says.
        tensors: name, type and shape of each tensor of a folder; empty if it has none.
    """

    name: str
    label: str
    folder: Path
    architecture: Architecture
    model: Shapes
    groups: int
    length: int
    ratios: tuple[int, ...]
    writing: tuple[int, ...]
    begins: tuple[int, ...]
    anchors: tuple[int, ...]
    cuts: str
    config: str = ""
    tensors: tuple[tuple[str, str, list[int]], ...] = ()


def _v4(
    name: str,
    label: str,
    folder: Path,
    architecture: Architecture,
    model: Model,
    ratios: Sequence[int],
    length: int = LENGTH,
    config: str = "",
) -> Checkpoint:
    """V4 by its shapes; its hash layers get token ids on the first stage alone."""
    layers = range(model.layers)
    anchors = [layer for layer in layers if ratios[layer] == 4]
    together = max(1, model.hashed)
    return Checkpoint(
        name,
        label,
        folder,
        architecture,
        model,
        model.groups,
        length,
        tuple(ratios),
        tuple(layer for layer in layers if ratios[layer]),
        tuple(layers[together:]),
        tuple(anchors or layers),
        f"the first needs {together} layers"
        + (", and each one of ratio 4" if anchors else ""),
        config,
    )


def _v41(
    name: str,
    label: str,
    folder: Path,
    model: V41,
    ratios: Sequence[int],
    sources: Sequence[int],
    indexers: Sequence[int],
    candidates: int,
    length: int = LENGTH,
    config: str = "",
) -> Checkpoint:
    """V4.1 by its shapes and by who writes what others read."""
    compressed = [layer for layer in range(model.layers) if ratios[layer]]

    def may_begin(start: int) -> bool:
        first = next((layer for layer in compressed if layer >= start), None)
        chosen_before = 0 <= candidates < start and max(indexers) >= start
        written_before = min(sources) < start
        return first in sources and written_before and not chosen_before

    begins = tuple(start for start in compressed if may_begin(start))
    return Checkpoint(
        name,
        label,
        folder,
        OF_V41,
        model,
        model.output_groups,
        length,
        tuple(ratios),
        tuple(sources),
        begins,
        tuple(sources),
        f"one may begin at the layers {', '.join(map(str, begins))} alone",
        config,
    )


def _place(label: str) -> Path:
    return Path(f"/path/to/DeepSeek-{label}")


NAMED: dict[str, Checkpoint] = {
    name: _v4(name, label, _place(label), architecture, model, model.ratios)
    for name, label, architecture, model in (
        ("flash", "V4-Flash", V4, FLASH),
        ("pro", "V4-Pro", V4, PRO),
        ("vision", "V4-Flash-Vision-Exp", OF_VISION, FLASH),
    )
} | {
    "v4.1": _v41(
        "v4.1",
        "V4.1-Flash",
        _place("V4.1-Flash"),
        FLASH_V41,
        V41_RATIOS,
        V41_SOURCES,
        V41_INDEXERS,
        V41_CANDIDATES,
    )
}
"""Published models."""


def checkpoint(name: str) -> Checkpoint:
    """The published model `name`, or the one in the folder `name`.

    Raises:
        UsageError: it is neither.
    """
    if name in NAMED:
        return NAMED[name]
    folder = Path(name).absolute()
    try:
        text = (folder / "config.json").read_text("utf-8")
        found = _known(folder, text)
        tensors = tuple(
            row
            for file in sorted(folder.glob("*.safetensors"))
            for row in headers(file)
        )
        if not tensors:
            _check_published_form(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_checkpoint(folder, _reason(error)) from None
    return Checkpoint(**{**vars(found), "tensors": tensors})


def _no_checkpoint(folder: Path, reason: str) -> UsageError:
    return UsageError(
        f"{folder} is no checkpoint of DeepSeek-V4 or V4.1",
        detail=[reason],
        hint=f"--model {' or '.join(NAMED)}, or a folder with config.json",
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, KeyError):
        return f"config.json has no {error.args[0]}"
    return str(error)


def _check_published_form(config: Mapping[str, Any]) -> None:
    """A configuration alone says what tensors there are in DeepSeek's own form only."""
    packing = config.get("quantization_config") or {}
    experts = packing.get("expert_dtype", config.get("expert_dtype", "fp4"))
    form = (packing.get("quant_method"), experts, packing.get("moe_quant_algo"))
    if form != ("fp8", "fp4", None):
        raise ValueError(
            "config.json names another quantization than DeepSeek's own, FP8 with"
            " experts in MXFP4, and there are no *.safetensors whose headers say more"
        )


def _known(folder: Path, text: str) -> Checkpoint:
    config = json.loads(text)
    kind = config["model_type"]
    if kind == "deepseek_v41":
        inner = config["text_config"]
        values = {key: inner[key] for key in V41_KEYS}
        return _v41(
            "",
            folder.name,
            folder,
            _shapes_v41(folder.name, values),
            values["compress_ratios"][: values["num_hidden_layers"]],
            values["kv_source_layer_ids"],
            values["index_source_layer_ids"],
            values["candidate_source_layer_id"],
            values["max_position_embeddings"],
            text,
        )
    if kind != "deepseek_v4":
        raise ValueError(f"its model_type is {kind}")
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    model = Model(
        name=folder.name,
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        q_lora=config["q_lora_rank"],
        groups=config["o_groups"],
        o_lora=config["o_lora_rank"],
        experts=config["n_routed_experts"],
        width=config["moe_intermediate_size"],
        plain=ratios.count(0),
        by4=ratios.count(4),
        by128=ratios.count(128),
        active=config["num_experts_per_tok"],
        vocabulary=config["vocab_size"],
        hashed=config["num_hash_layers"],
    )
    length = config["max_position_embeddings"]
    architecture = OF_VISION if config.get("vision_n_layers") else V4
    return _v4("", folder.name, folder, architecture, model, ratios, length, text)


def _shapes_v41(name: str, text: Mapping[str, Any]) -> V41:
    ratios = text["compress_ratios"][: text["num_hidden_layers"]]
    sources = [ratios[layer] for layer in text["kv_source_layer_ids"]]
    indexers = [ratios[layer] for layer in text["index_source_layer_ids"]]
    return V41(
        name=name,
        hidden=text["hidden_size"],
        heads=text["num_attention_heads"],
        q_lora=text["q_lora_rank"],
        o_lora=text["o_lora_rank"],
        output_groups=text["o_groups"],
        experts=text["n_routed_experts"],
        width=text["moe_intermediate_size"],
        active=text["num_experts_per_tok"],
        vocabulary=text["vocab_size"],
        plain=ratios.count(0),
        ratio2=ratios.count(2),
        sources2=sources.count(2),
        ratio1=ratios.count(1),
        sources1=sources.count(1),
        indexing1=indexers.count(1) - sources.count(1),
        engrams=len(text["engram_layer_ids"]),
        row=text["engram_head_dim"],
    )


def headers(file: Path) -> list[tuple[str, str, list[int]]]:
    """Name, type and shape of each tensor of a safetensors file.

    Raises:
        ValueError: it is none.
    """
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > 100_000_000:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return [(name, of["dtype"], of["shape"]) for name, of in header.items()]
