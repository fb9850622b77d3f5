# SPDX-License-Identifier: Apache-2.0
"""Zeroing new blocks of the paged caches leaves all other blocks as they are."""

from types import SimpleNamespace

import pytest
import torch
from helpers import layout

BLOCKS = 4
UTILS = "vllm.v1.worker.utils"


def zero(caches: dict[str, torch.Tensor], ids: list[int], ratio: int = 1) -> None:
    """Let vLLM zero the blocks `ids` of layers with `ratio` kernel blocks each; a
    layer's cache is `[blocks * ratio, 64, 1, width]`."""
    spec = layout.module("vllm.v1.kv_cache_interface").MLAAttentionSpec(
        block_size=64 * ratio, num_kv_heads=1, head_size=64, dtype=torch.uint8
    )
    group = SimpleNamespace(
        kv_cache_spec=spec,
        kv_cache_group_id=0,
        backend=SimpleNamespace(get_kv_cache_block_dim=lambda *args, **kwargs: 0),
        layer_names=list(caches),
    )
    context = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
    zeroer = layout.module(UTILS).KVBlockZeroer(
        layout.device(), [group], [64], "auto", context
    )
    zeroer.zero_block_ids(ids)


def packed(
    widths: list[int], ratio: int = 1
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Ones in which layers of these widths share each block, and the layers' views."""
    sizes = [64 * width for width in widths]
    stride = sum(sizes)
    backing = torch.ones(BLOCKS * ratio * stride, dtype=torch.uint8)
    backing = backing.to(layout.device())
    views, offset = [], 0
    for width, size in zip(widths, sizes, strict=True):
        shape, strides = (BLOCKS * ratio, 64, 1, width), (stride, width, width, 1)
        views.append(backing.as_strided(shape, strides, offset))
        offset += size
    return backing, views


@pytest.mark.parametrize("ratio", [1, 2])
def test_layers_that_share_blocks(ratio: int) -> None:
    backing, (first, second) = packed([64, 32], ratio)
    zero({"first": first, "second": second}, [1], ratio)
    blocks = backing.view(BLOCKS, -1).cpu()
    others = int((blocks[[0, 2, 3]] == 0).sum())
    assert others == 0, f"it clears {others} bytes of another block"
    assert not blocks[1].any()


@pytest.mark.unchanged
def test_a_layer_with_blocks_of_its_own() -> None:
    backing, views = packed([64])
    zero({"layer": views[0]}, [0, 2])
    blocks = backing.view(BLOCKS, -1).cpu()
    assert not blocks[[0, 2]].any()
    assert blocks[[1, 3]].all()
