# SPDX-License-Identifier: Apache-2.0
"""Small models that vLLM's default loader fills, and the error at which it stops."""

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from . import layout, model_configs

LOADER = "vllm.model_executor.model_loader.default_loader"
NAME = "part.weight"


class Model(torch.nn.Module):
    """One linear layer, loaded as vLLM's own models are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.part = torch.nn.Linear(4, 4, bias=False)
        self.part.weight = torch.nn.Parameter(torch.zeros(4, 4).to(dtype), False)
        self.part.scale = torch.nn.Parameter(torch.zeros(1), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = layout.module("vllm.model_executor.models.utils").AutoWeightsLoader
        loaded: set[str] = loader(self).load_weights(weights)
        return loaded


def message(
    monkeypatch: pytest.MonkeyPatch,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
    owner: str = "model",
    made: type[Model] = Model,
    local_experts: set[int] | None = None,
    shard: Path | None = None,
) -> str:
    """The error of loading these tensors, or a shard; empty without one.

    Args:
        owner: "model" or "draft" of DeepSeek-V4, whose loader is the wheel's plugin's
            if it has one, or "another" model.

    """
    kind = default = layout.module(LOADER).DefaultModelLoader
    if owner != "another" and importlib.util.find_spec("vllm_xpu_dsv4"):
        plugin = layout.module("vllm_xpu_dsv4.loader")
        kind = plugin.CheckedLoader
        # Others are tested for what each tensor is.
        monkeypatch.setattr(plugin, "check_tensors", lambda config, given, **_: given)
    config = model_configs.vllm_config()
    config.model_config.quantization = "fp8"
    config.model_config.multimodal_config = None
    config.model_config.runner_type = "draft" if owner == "draft" else "generate"
    config.model_config.model = str(shard and shard.parent)
    config.model_config.revision = None

    def given(*_: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    with model_configs.current(config):
        loader = kind(config.load_config)
        if shard is None:
            monkeypatch.setattr(default, "get_all_weights", given)
        loader.counter_before_loading_weights = 0.0
        monkeypatch.setattr(loader, "_init_ep_weight_filter", lambda _: None)
        loader.local_expert_ids = local_experts
        try:
            loader.load_weights(made(dtype), config.model_config)
        except Exception as error:
            return str(error)
    return ""
