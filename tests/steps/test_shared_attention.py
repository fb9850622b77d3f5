# SPDX-License-Identifier: Apache-2.0
"""Another model's layers take V4's attention, and say which entries they read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layer_parts, layout, model_configs, model_layers
from helpers import reference_attention as reference
from helpers.attention_batch import RATIOS, Batch, random_sinks

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
            self.max_model_len, self.PREFILL_CHUNK_SIZE = 200, 4
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


def reserved(layer: Any) -> tuple[int, int]:
    """Compressed entries of a request, and of a token, that a profile run reserves."""
    from vllm.forward_context import create_forward_context as create
    from vllm.forward_context import override_forward_context as override

    made: list[tuple[int, int, int]] = []
    layer._prefill_workspace = lambda *given: made.append(given)
    layer._decode_workspace = lambda: None
    q, positions = torch.ones(1, 8, 512), torch.zeros(1, dtype=torch.int64)
    with override(create(None, model_configs.vllm_config())):
        layer.forward_mqa(q, q, positions, q)
    assert not q.any(), "a profile run leaves rows"
    ((requests, entries, of_a_token),) = made
    assert requests == layer.PREFILL_CHUNK_SIZE
    return entries - layer.window_size - layer.max_num_batched_tokens, of_a_token


def test_its_profile_reserves_what_the_layer_reads() -> None:
    assert reserved(other_layer()) == (200, 16)


@pytest.mark.unchanged
@pytest.mark.parametrize(
    ("ratio", "entries"), [(0, (0, 0)), (4, (1024, 512)), (128, (32, 32))]
)
def test_what_layers_of_v4_reserve(ratio: int, entries: tuple[int, int]) -> None:
    layer = model_layers.attention_layer(model_configs.vllm_config(), ratio)
    assert reserved(layer) == entries


@pytest.mark.unchanged
@pytest.mark.parametrize("ratio", RATIOS)
def test_layers_of_v4_attend(ratio: int) -> None:
    """A decode beside a prompt."""
    sinks = random_sinks(8)
    batch = Batch(ratio, (131, 260), (1, 2), sinks=sinks, attend=layer_parts.attend)
    assert reference.relative(batch.forward(), batch.expected(sinks)) < 4e-3


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
