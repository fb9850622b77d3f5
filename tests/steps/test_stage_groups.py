# SPDX-License-Identifier: Apache-2.0
"""A pipeline stage allocates no cache of layers that other stages have."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers import layout, model_configs

INTERFACE = layout.module("vllm.v1.kv_cache_interface")
PLANNING = layout.module(layout.CACHE_PLANNING)
SPEC = INTERFACE.SlidingWindowMLASpec(
    block_size=64,
    num_kv_heads=1,
    head_size=512,
    dtype=torch.uint8,
    sliding_window=128,
    cache_dtype_str="fp8_ds_mla",
    alignment=576,
    model_version="deepseek_v4",
)
TARGET, DRAFT = ("layers.0", "layers.1"), ("mtp.0",)


def allocated(layers: Iterable[str]) -> list[str]:
    """The layers whose caches a stage allocates that has `layers` of the model's and
    its draft's, which are two groups."""
    kind = INTERFACE.UniformTypeKVCacheSpecs
    groups = [
        INTERFACE.KVCacheGroupSpec(
            list(names), kind(block_size=64, kv_cache_specs=dict.fromkeys(names, SPEC))
        )
        for names in (TARGET, DRAFT)
    ]
    own: dict[str, Any] = dict.fromkeys(layers, SPEC)
    here = PLANNING._project_kv_cache_groups_to_worker(groups, own)
    vllm_config = model_configs.vllm_config()
    # As the engine resolves it for DeepSeek-V4.
    vllm_config.cache_config.kv_cache_layout = "BLHNC"
    config = PLANNING.get_kv_cache_config_from_groups(vllm_config, here, 1 << 24)
    return [name for tensor in config.kv_cache_tensors for name in tensor.layers]


@pytest.mark.parametrize("layers", [TARGET[:1], DRAFT], ids=["first", "last"])
def test_a_stage_without_layers_of_a_group(layers: tuple[str, ...]) -> None:
    found = allocated(layers)
    assert found == list(layers), f"the stage allocates caches of others: {found}"


@pytest.mark.unchanged
def test_a_stage_with_layers_of_all_groups() -> None:
    assert allocated((TARGET[1], *DRAFT)) == [TARGET[1], *DRAFT]
