# SPDX-License-Identifier: Apache-2.0
"""The pipeline stages of a split: which are alike, so that one of them tells of all."""

import copy
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import forks
import torch
from vllm.distributed.utils import get_pp_indices

LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
"""The number of a layer in a name."""
CONFIGURED = ("compress_ratios", "layer_types", "mlp_layer_types")
"""Lists of a configuration with an entry for each layer."""


def built(
    vllm_config: Any,
    build: Callable[[Any, int], dict[str, Any]],
    tensors: Mapping[str, torch.Tensor],
    at_once: int,
) -> list[dict[str, Any]]:
    """What `build` says of each stage of the configuration; of stages whose layers are
    alike it builds one.

    Args:
        build: one stage, by its number.
        tensors: of the checkpoint, by which layers are compared.
        at_once: processes.
    """
    config = vllm_config.model_config.hf_text_config
    count = vllm_config.parallel_config.pipeline_parallel_size
    layers = config.num_hidden_layers
    bounds = [get_pp_indices(layers, number, count) for number in range(count)]
    kinds = _kinds(config, tensors)
    alike: dict[Any, list[int]] = defaultdict(list)
    for number, (first, last) in enumerate(bounds):
        end = number if number in (0, count - 1) else ""
        alike[end, tuple(kinds[first:last])].append(number)
    firsts = [numbers[0] for numbers in alike.values()]
    works = [functools.partial(build, vllm_config, number) for number in firsts]
    found: dict[int, dict[str, Any]] = {}
    for one, numbers in zip(forks.forked(works, at_once), alike.values(), strict=True):
        for number in numbers:
            found[number] = moved(one, bounds[number][0] - bounds[numbers[0]][0])
    return [found[number] for number in range(count)]


def _kinds(config: Any, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """Of each layer, what distinguishes it from others but its number."""
    parts: dict[int, list[Any]] = defaultdict(list)
    for name, tensor in tensors.items():
        if name.startswith("mtp.") or not (match := LAYER.search(name)):
            continue
        rest = name[: match.start()] + name[match.end() :]
        parts[int(match[0])].append((rest, tensor.dtype, tuple(tensor.shape)))
    lists = [getattr(config, name, None) or () for name in CONFIGURED]
    return [
        (
            hash(frozenset(parts[layer])),
            tuple(one[layer] if layer < len(one) else None for one in lists),
        )
        for layer in range(config.num_hidden_layers)
    ]


def moved(stage: dict[str, Any], by: int) -> dict[str, Any]:
    """The same stage so many layers further on: its caches have other names, and
    descriptions of their own, which a release pads in place."""

    def renamed(name: str) -> str:
        return LAYER.sub(lambda match: str(int(match[0]) + by), name)

    caches = stage["answers"]["get_kv_cache_spec"]
    named = {renamed(name): copy.copy(spec) for name, spec in caches.items()}
    return {**stage, "answers": {**stage["answers"], "get_kv_cache_spec": named}}
