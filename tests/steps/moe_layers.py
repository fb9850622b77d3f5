# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of DeepSeek-V4 and its router, from the installed vLLM."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import layout
import model_configs
import pytest
import torch

GATE_LINEAR = f"{layout.FUSED_MOE}.router.gate_linear"


def _in_bf16() -> Any:
    utilities = layout.module("vllm.utils.torch_utils")
    return utilities.set_default_torch_dtype(torch.bfloat16)


def experts(config: Any, layer: int = 1) -> Any:
    """The router, the routed and the shared experts of a layer, not loaded."""
    with model_configs.current(config), _in_bf16():
        model = layout.module(layout.MODEL)
        return model.DeepseekV4MoE(config, prefix=f"model.layers.{layer}.ffn")


def gate(inputs: int, outputs: int, **options: Any) -> Any:
    """A router of random BF16 weights, in the class that the model takes."""
    with model_configs.current(model_configs.vllm_config()), _in_bf16():
        kind = layout.module(GATE_LINEAR).GateLinear
        made = kind(inputs, outputs, prefix="model.layers.1.ffn.gate", **options)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return made


def pretend(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Let a router that is made find another platform: "CUDA" of capability 9.0,
    "ROCm" or "CPU"."""
    cuda, rocm = platform == "CUDA", platform == "ROCm"
    answers = SimpleNamespace(
        is_cuda=lambda: cuda,
        is_rocm=lambda: rocm,
        is_cuda_alike=lambda: cuda or rocm,
        is_xpu=lambda: False,
        is_device_capability=lambda capability: cuda and capability == (9, 0),
        is_device_capability_family=lambda family: False,
    )
    rocm_module = SimpleNamespace(on_gfx950=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", rocm_module)
    monkeypatch.setattr(layout.module(GATE_LINEAR), "current_platform", answers)


def rocm_multiplies_into_float32() -> bool:
    """Whether the release lets ROCm take the product with a float32 result too."""
    source = Path(str(layout.module(GATE_LINEAR).__file__)).read_text()
    either = r"is_cuda\(\)\s+or current_platform\.is_rocm\(\)"
    return re.search(either, source) is not None
