# SPDX-License-Identifier: Apache-2.0
"""Without the hybrid KV cache manager, window caches are allocated as full ones."""

from typing import Any

import pytest
import torch
from helpers import layout

INTERFACE = layout.module("vllm.v1.kv_cache_interface")
PLANNING = layout.module(layout.CACHE_PLANNING)
SHAPE = {"block_size": 64, "num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
KEYS = {
    "cache_dtype_str": "fp8_ds_mla",
    "alignment": 576,
    "model_version": "deepseek_v4",
}


def specs(**window: Any) -> dict[str, Any]:
    """A layer that sees a window, and one that sees compressed entries, too."""
    kind = INTERFACE.SlidingWindowMLASpec
    return {
        "window": kind(sliding_window=128, **SHAPE, **KEYS, **window),
        "whole": INTERFACE.MLAAttentionSpec(**SHAPE, **KEYS),
    }


@pytest.mark.parametrize("replayed", [False, True])
def test_a_window_becomes_a_full_cache(replayed: bool) -> None:
    found = specs(bounded_replay=replayed)
    PLANNING.unify_hybrid_kv_cache_specs(found)
    assert type(found["window"]) is type(found["whole"])
    assert found["window"].sliding_window == 128
    assert PLANNING.is_kv_cache_spec_uniform(found)


@pytest.mark.unchanged
def test_what_has_no_window_stays() -> None:
    found = specs()
    del found["window"]
    PLANNING.unify_hybrid_kv_cache_specs(found)
    assert found == {"whole": specs()["whole"]}
