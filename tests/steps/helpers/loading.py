# SPDX-License-Identifier: Apache-2.0
"""Small models that vLLM's default loader fills, and the error at which it stops."""

from collections.abc import Iterable, Iterator
from typing import Any

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


def deepseek_v4() -> Any:
    registry = layout.module("vllm.model_executor.models.registry")
    return registry.ModelRegistry.models["DeepseekV4ForCausalLM"].load_model_cls()


def model_classes() -> dict[str, Any]:
    """Every class of a DeepSeek-V4 or V4.1 and its drafts that the release serves on
    XPU, by architecture."""
    registry = layout.module("vllm.model_executor.models.registry").ModelRegistry
    found = {
        name: entry.load_model_cls()
        for name, entry in registry.models.items()
        if ".deepseek_v4" in getattr(entry, "module_name", "")
    }
    return {
        name: kind
        for name, kind in found.items()
        # Else another platform's, or a stub.
        if not layout.WITH_XPU_FOLDER or ".xpu." in kind.__module__
    }


def message(
    monkeypatch: pytest.MonkeyPatch,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
    owner: Any = None,
    made: type[Model] = Model,
    local_experts: set[int] | None = None,
) -> str:
    """The error of loading these tensors; empty without one."""
    kind = layout.module(LOADER).DefaultModelLoader
    config = model_configs.vllm_config()
    config.model_config.quantization = "fp8"
    config.model_config.multimodal_config = None
    model = made(dtype)
    for name in ("requires_scales", "reads_draft"):
        if hasattr(owner, name):
            setattr(model, name, getattr(owner, name))

    def given(*_: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    with model_configs.current(config):
        loader = kind(config.load_config)
        monkeypatch.setattr(loader, "get_all_weights", given)
        loader.counter_before_loading_weights = 0.0
        monkeypatch.setattr(loader, "_init_ep_weight_filter", lambda _: None)
        loader.local_expert_ids = local_experts
        try:
            loader.load_weights(model, config.model_config)
        except Exception as error:
            return str(error)
    return ""
