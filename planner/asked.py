# SPDX-License-Identifier: Apache-2.0
"""What somebody asks for: a model, devices, and the load that they must carry."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory import DEVICES, FLASH, PRO, Device, Model, Shapes
from benchmarks.memory_v41 import FLASH_V41, V41
from xpustack.core.errors import UsageError


@dataclass(frozen=True)
class Architecture:
    """What a server of it is told.

    Attributes:
        block_size: tokens of a block of the cache.
        parser: of thoughts and tool calls.
        images: whether it takes any, which a plan leaves out.
        needs_tokenizer: to build the model; V4.1's tables of n-grams depend on it.
    """

    block_size: int
    parser: str
    images: bool = False
    needs_tokenizer: bool = False


V4 = Architecture(256, "deepseek_v4")
OF_V41 = Architecture(128, "deepseek_v41", images=True, needs_tokenizer=True)
NAMED: dict[str, tuple[str, Architecture, Shapes]] = {
    "flash": ("V4-Flash", V4, FLASH),
    "pro": ("V4-Pro", V4, PRO),
    "v4.1": ("V4.1-Flash", OF_V41, FLASH_V41),
}
"""What a published model is called after "DeepSeek-", and its shapes."""
SHARE = 0.9
"""Of a device's memory, what vLLM may use."""
ACTIVATIONS = 3 << 30
"""Bytes set aside for activations and workspaces, which nobody has measured on an
Intel GPU."""
CHUNKS = (8192, 4096, 2048)
"""Tokens of a prompt that a step reads at most: the largest with which all fits."""
V41_KEYS = (
    *("compress_ratios", "num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("o_groups", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"),
    *("n_routed_experts", "num_experts_per_tok", "vocab_size"),
    *("kv_source_layer_ids", "index_source_layer_ids"),
    *("engram_layer_ids", "engram_head_dim", "engram_vocab_size"),
)
"""What a plan reads of V4.1's `text_config`."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is published.

    Attributes:
        name: of `NAMED`; empty for a folder.
        label: what people call it.
        folder: where it lies; for a published one, where it could.
        tensors: name, type and shape of each tensor of a folder.
    """

    name: str
    label: str
    folder: Path
    architecture: Architecture
    model: Shapes
    tensors: tuple[tuple[str, str, list[int]], ...] = ()


@dataclass(frozen=True)
class Asked:
    """A plan that is wanted.

    Attributes:
        replicas: data-parallel ones, among which the requests are spread.
        expert_parallel: whether ranks hold whole experts.
    """

    checkpoint: Checkpoint
    device: Device
    count: int
    context: int
    requests: int
    replicas: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.count % self.replicas:
            raise UsageError(
                f"{self.count} devices cannot be {self.replicas} equal replicas",
                hint="--data-parallel-size must divide --count",
            )

    def splits(self) -> list[dict[str, int]]:
        """Every split over all devices, as arguments of vLLM's engine."""
        each = self.count // self.replicas
        more = {"data_parallel_size": self.replicas} if self.replicas > 1 else {}
        if self.expert_parallel:
            more["enable_expert_parallel"] = True
        return [
            {"tensor_parallel_size": n, "pipeline_parallel_size": each // n} | more
            for n in range(each, 0, -1)
            if each % n == 0
        ]

    @property
    def of_a_replica(self) -> int:
        """Requests that one replica must carry."""
        return -(-self.requests // self.replicas)

    def usable(self) -> float:
        """Bytes of a device that vLLM may use."""
        return float(self.device.memory * SHARE * (1 << 30))


def device(name: str) -> Device:
    """The device called `name`, such as b60.

    Raises:
        UsageError: there is none.
    """
    known = {short(one): one for one in DEVICES}
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    if wanted not in known:
        raise UsageError(
            f"no figures of a device {name!r} are known",
            detail=[f"known: {', '.join(known)}"],
            hint="name one of them; docs/deploying.md, Devices",
        )
    return known[wanted]


def short(one: Device) -> str:
    """What a device is called on the command line."""
    plain = re.sub(r"[^a-z0-9]", "", one.name.partition(",")[0].lower())
    return plain.removeprefix("arcpro")


def checkpoint(name: str) -> Checkpoint:
    """The published model `name`, or the one in the folder `name`.

    Raises:
        UsageError: it is neither.
    """
    if name in NAMED:
        label, architecture, model = NAMED[name]
        folder = Path(f"/path/to/DeepSeek-{label}")
        return Checkpoint(name, label, folder, architecture, model)
    folder = Path(name).absolute()
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        known = _known(folder.name, config)
        tensors = tuple(
            row
            for file in sorted(folder.glob("*.safetensors"))
            for row in _headers(file)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_checkpoint(folder, _reason(error)) from None
    if not tensors:
        raise _no_checkpoint(folder, "it has no *.safetensors")
    return Checkpoint("", folder.name, folder, *known, tensors)


def _no_checkpoint(folder: Path, reason: str) -> UsageError:
    return UsageError(
        f"{folder} is no checkpoint of DeepSeek-V4 or V4.1",
        detail=[reason],
        hint=f"--model {' or '.join(NAMED)}, or a folder with config.json and tensors",
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, KeyError):
        return f"config.json has no {error.args[0]}"
    return str(error)


def _known(name: str, config: dict[str, Any]) -> tuple[Architecture, Shapes]:
    if config["model_type"] == "deepseek_v41":
        text = config["text_config"]
        for key in V41_KEYS:
            text[key]
        return OF_V41, _v41(name, text)
    if config["model_type"] != "deepseek_v4":
        raise ValueError(f"its model_type is {config['model_type']}")
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    return V4, Model(
        name=name,
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


def _v41(name: str, text: dict[str, Any]) -> V41:
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


def _headers(file: Path) -> list[tuple[str, str, list[int]]]:
    """Name, type and shape of each tensor of a safetensors file."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > 100_000_000:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return [(name, of["dtype"], of["shape"]) for name, of in header.items()]
