# SPDX-License-Identifier: Apache-2.0
"""Another model's layers take V4's attention, and say which entries they read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers

XPU = "vllm.models.deepseek_v4.xpu"
PREFIX = "model.layers.7.attn"


def shared() -> Any:
    module = layout.module(f"{XPU}.xpu_sparse")
    try:
        return module.XPUSparseMLA
    except AttributeError as error:
        pytest.fail(str(error))


def pages(tokens: int) -> torch.Tensor:
    return torch.zeros((2, tokens, 584), dtype=torch.uint8, device=layout.device())


def other_layer() -> Any:
    """Of ratio 1, whose indexer chooses 16 entries in the cache of layer 7."""
    cache = pages(128)

    class Layer(shared()):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.compress_ratio = 1
            self.topk_indices_buffer = torch.zeros((8, 16), dtype=torch.int32)
            self.n_local_heads, self.n_local_groups = 8, 2
            self.window_size, self.max_num_batched_tokens = 128, 8
            self.swa_cache_layer = SimpleNamespace(kv_cache=pages(32))
            self.wo_a = torch.nn.Module()

        def reads_compressed(self) -> bool:
            return True

        def reads_indexer(self) -> bool:
            return True

        def compressed_cache(self) -> tuple[str, torch.Tensor]:
            return PREFIX, cache

    return Layer()


def test_its_warm_up_measures_what_the_layer_reads() -> None:
    kernel = layout.module(f"{XPU}.jit_warmup").XPU_SPARSE_DECODE_KERNEL
    keys = kernel.get_warmup_keys(other_layer())
    assert {key.pages.block_size for key in keys} == {128}
    assert {key.swa_pages.block_size for key in keys} == {32}
    assert {key.topk_width for key in keys} == {16}


@pytest.mark.parametrize(
    ("ratio", "reads"),
    [(0, (False, False)), (4, (True, True)), (128, (True, False))],
)
def test_what_layers_of_v4_read(ratio: int, reads: tuple[bool, bool]) -> None:
    kind = shared()
    layer = model_layers.attention_layer(model_configs.vllm_config(), ratio)
    assert isinstance(layer, kind) and layer.norms_query
    assert (layer.reads_compressed(), layer.reads_indexer()) == reads
    if layer.reads_compressed():
        layer.kv_cache = pages(64)
        prefix, cache = layer.compressed_cache()
        assert prefix == layer.prefix and cache is layer.kv_cache
