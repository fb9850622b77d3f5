# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with one fault each, as a broken download or conversion leaves them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from proof.e2e.checkpoints import checkpoint

WEIGHTS = "model.safetensors"
LINEAR = "layers.1.attn.wq_b"
EXPERT = "layers.1.ffn.experts.3.w1"
FUSED = "layers.1.attn.wkv"
LAST = "mtp.0.ffn.experts.7.w3.weight"
"""The tensor at the end of the shard."""


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    kept = dict(checkpoint.tensors(folder))
    change(kept)
    save_file(kept, folder / WEIGHTS, {"format": "pt"})


def _described(folder: Path, name: str, value: object) -> None:
    file = folder / "config.json"
    described = json.loads(file.read_text())
    described["quantization_config"][name] = value
    file.write_text(json.dumps(described))


def without(name: str) -> Callable[[Path], None]:
    """The checkpoint lacks a tensor."""
    return lambda folder: _tensors(folder, lambda kept: kept.__delitem__(name))


def _halved(folder: Path) -> None:
    def halve(kept: dict[str, torch.Tensor]) -> None:
        name = f"{LINEAR}.weight"
        kept[name] = kept[name][: len(kept[name]) // 2].contiguous()

    _tensors(folder, halve)


def _truncated(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scale of a linear layer": (without(f"{LINEAR}.scale"), LINEAR),
    "no scale of half a fused layer": (without(f"{FUSED}.scale"), FUSED),
    "no scale of an expert": (without(f"{EXPERT}.scale"), EXPERT),
    "a wrong shape": (_halved, LINEAR),
    "an unknown format": (
        lambda folder: _described(folder, "quant_method", "fp3"),
        "fp3",
    ),
    "a truncated shard": (_truncated, LAST),
}
"""What is done to a folder, and the name that the engine's message must have."""


def damage(whole: Path, folder: Path, name: str) -> Path:
    """A copy of the checkpoint `whole` in `folder`, with one of `DAMAGES`."""
    shutil.copytree(whole, folder)
    DAMAGES[name][0](folder)
    return folder
