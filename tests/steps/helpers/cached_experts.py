# SPDX-License-Identifier: Apache-2.0
"""A layer's experts in host memory, as vLLM builds and loads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from . import layout, model_configs, model_layers
from .mxfp4_experts import weights

EXPERTS, TOPK, HIDDEN, INTER, TOKENS = 6, 2, 64, 32, 5
LIMIT = 10.0
EXPERT_BYTES = 3 * HIDDEN * INTER // 2 + 3 * HIDDEN * INTER // 32
LAYERS = 2
FIRST, LATER = (f"model.layers.{number}.ffn.experts" for number in range(LAYERS))


@contextmanager
def current_config() -> Iterator[Any]:
    """The configuration of two layers, while it is vLLM's."""
    platform = layout.module("vllm.platforms").current_platform
    if hasattr(platform, "provide_pinned_memory"):
        platform.provide_pinned_memory()
    made = model_configs.vllm_config()
    made.model_config.get_layers_start_end_indices = lambda parallel: (0, LAYERS)
    with model_configs.current(made), layout.worker():
        layout.workspace()
        yield made


def take_slots(config: Any, slots: int) -> None:
    from vllm.config import OffloadConfig

    config.offload_config = OffloadConfig(moe_expert_cache_size=slots)


class Layer(torch.nn.Module):
    """What a quantization method sees of a layer's experts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer_name = name
        self.swiglu_limit = LIMIT
        self.expert_map = None
        self.global_num_experts = EXPERTS
        self.apply_router_weight_on_input = False

    def _expert_routing_tables(self) -> None:
        return None


def experts_config(**others: Any) -> Any:
    return model_layers.experts_config(
        activation="SILU",
        num_experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        inter=INTER,
        **others,
    )


def method(**others: Any) -> Any:
    kind = layout.module("vllm.model_executor.layers.quantization.mxfp4")
    return kind.Mxfp4MoEMethod(experts_config(**others))


def build(made: Any, name: str = LATER) -> Layer:
    """A layer with the weights that `made` allocates."""
    layer = Layer(name)
    layer.activation = made.moe.activation
    made.create_weights(
        layer,
        EXPERTS,
        HIDDEN,
        INTER,
        torch.bfloat16,
        weight_loader=lambda *_: None,
    )
    return layer


def load(made: Any, layer: Layer) -> None:
    """Give the layer the weights of a checkpoint, and process them."""
    torch.manual_seed(0)
    given = (
        *weights(EXPERTS, 2 * INTER, HIDDEN, (118, 123)),
        *weights(EXPERTS, HIDDEN, INTER, (118, 123)),
    )
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    for name, tensor in zip(names, given, strict=True):
        getattr(layer, name).data.copy_(tensor)
    made.process_weights_after_loading(layer)


def loaded(name: str = LATER) -> tuple[Any, Layer]:
    """A method and its layer, with weights."""
    made = method()
    layer = build(made, name)
    load(made, layer)
    return made, layer


def outputs(
    made: Any, layer: Layer, steps: tuple[int, ...] = (TOKENS, 1, TOKENS)
) -> list[torch.Tensor]:
    """What steps of so many tokens give."""
    torch.manual_seed(1)
    found = []
    for tokens in steps:
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=layout.device())
        scores, ids = torch.rand(tokens, EXPERTS, device=layout.device()).topk(TOPK)
        chosen = ids.to(torch.int32)
        found.append(made.apply(layer, x, scores, chosen, None, None).cpu().clone())
    return found


class Executor:
    """Of workers of this process, as many as `layers`, which all of them have."""

    def __init__(self, config: Any, layers: list[Any]) -> None:
        self.workers = [SimpleNamespace(vllm_config=config)] * len(layers)
        compilation = config.compilation_config
        for place, (made, layer) in enumerate(layers):
            layer.quant_method = made
            runner = SimpleNamespace(routed_experts=layer)
            compilation.static_forward_context[f"moe.{place}"] = runner
            compilation.static_all_moe_layers.append(f"moe.{place}")

    def collective_rpc(self, method: Any) -> list[Any]:
        return [method(worker) for worker in self.workers]


class Host:
    """A parameter's values on the host, which say where they were moved."""

    def __init__(self) -> None:
        self.moved: list[torch.device] = []

    def to(self, device: torch.device) -> torch.Tensor:
        self.moved.append(device)
        return torch.ones(2)


PAGE = 1000
"""Bytes of a block of the cache of all layers."""


def cache_of(blocks: int) -> Any:
    """A cache for one layer that reads back all tokens, and one that reads 16."""

    def group(**fields: Any) -> SimpleNamespace:
        spec = SimpleNamespace(page_size_bytes=PAGE, block_size=16, **fields)
        return SimpleNamespace(kv_cache_spec=spec)

    whole = group(max_memory_usage_bytes=lambda _: 8 * PAGE)
    window = group(max_memory_usage_bytes=lambda _: 5 * PAGE, sliding_window=16)
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_tensors=[SimpleNamespace(size=blocks * PAGE)] * 2,
        kv_cache_groups=[whole, window],
    )
