# SPDX-License-Identifier: Apache-2.0
"""The JIT warm-up compiles every kernel that attention needs for a request."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from helpers import indexer_batch, layer_parts, layout, model_layers
from helpers.attention_batch import Batch, random_sinks
from helpers.block_fp8 import load
from helpers.compilations import check, compiled, warmed_up

KERNELS = "vllm.model_executor.kernels.xpu_dsv4"


def registered(registries: list[Any]) -> Callable[[Any, int], Any]:
    """A function that builds an attention layer in a registry, which `registries`
    gets."""
    warmup = layout.module("vllm.model_executor.warmup.jit_warmup")

    def build(config: Any, ratio: int) -> Any:
        registries.append(warmup.JitWarmupRegistry(config))
        with registries[-1].activate():
            return model_layers.attention_layer(config, ratio)

    return build


def give_pages(layer: Any) -> None:
    """Empty pages for the attention of a ratio-4 layer, which the warm-up measures."""
    for cache, tokens in ((layer, 64), (layer.swa_cache_layer, 64)):
        cache.kv_cache = torch.zeros(
            (2, tokens, 584), dtype=torch.uint8, device=layout.device()
        )


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=layout.device())


@pytest.mark.parametrize(
    ("ratio", "seq_lens", "query_lens"),
    [
        (0, (5,) * 9, (1,) * 9),
        (0, (260, 9, 7), (1, 1, 4)),
        (4, (131, 600), (1, 3)),
        (128, (259, 140), (1, 2)),
    ],
    ids=["window decode", "window", "ratio 4", "ratio 128"],
)
def test_a_request_compiles_nothing(
    ratio: int,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registries: list[Any] = []
    batch = Batch(
        ratio, seq_lens, query_lens, sinks=random_sinks(), build=registered(registries)
    )
    before = warmed_up(registries[0], monkeypatch)
    with batch.ready() as run, compiled(monkeypatch) as needed:
        run()
    check(needed, before)


def test_a_request_of_a_layer_in_fp8_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention writes the operands of wo_a's product, and rounds them."""
    registries: list[Any] = []
    batch = Batch(
        *(4, (131, 600), (1, 3)),
        sinks=random_sinks(),
        attend=layer_parts.attend,
        build=registered(registries),
        quantized=True,
    )
    load(batch.whole.wo_a)
    layer_parts.finish_loading(batch.whole)
    before = warmed_up(registries[0], monkeypatch)
    positions = torch.tensor(batch.positions()).to(layout.device())
    like = torch.empty(len(positions), 256, dtype=torch.bfloat16)
    output = batch.whole._alloc_attn_out(len(positions), like.to(layout.device()))
    with batch.ready(), compiled(monkeypatch) as needed:
        batch.attend(batch.queries, batch.queries, positions, output)
    check(needed, before)


@pytest.mark.parametrize(("ratio", "width"), [(0, 128), (4, 640), (128, 256)])
def test_decode_is_compiled_for_all_keys_of_a_token(ratio: int, width: int) -> None:
    """Of its window, and as many as the indexer chooses or as a context has; for each
    number of tokens a kernel without splits, with a few or with many."""
    batch = Batch(ratio, (131,), (1,), sinks=random_sinks(), build=registered([]))
    module = layout.module("vllm.models.deepseek_v4.xpu.jit_warmup")
    if batch.layer.topk_indices_buffer is not None:
        # As many rows as it has columns otherwise.
        batch.layer.topk_indices_buffer = batch.layer.topk_indices_buffer[:8]
    keys = module.XPU_SPARSE_DECODE_KERNEL.get_warmup_keys(batch.layer)
    assert {key.topk_width + key.swa_width for key in keys} == {width}
    most, heads = batch.layer.max_num_batched_tokens, batch.layer.n_local_heads
    config_of = layout.module(f"{KERNELS}.mla._decode_config").decode_config
    splits = [config_of(n, heads, width).splits for n in range(1, most + 1)]
    few = layout.module(f"{KERNELS}.mla._merge").FEW_SPLITS

    def kinds(splits: Iterable[int]) -> set[int]:
        return {(n > 1) + (n > few) for n in splits}

    assert keys[0].num_tokens == 1
    assert kinds(splits[key.num_tokens - 1] for key in keys) == kinds(splits)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [((300,), (1,)), ((300, 70, 9), (1, 1, 5)), ((90, 40), (6, 5))],
    ids=["decode", "mixed", "prefill"],
)
def test_an_mxfp4_indexer_compiles_nothing(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registries: list[Any] = []
    batch = indexer_batch.Batch(
        seq_lens, query_lens, fp4=True, build=registered(registries)
    )
    give_pages(batch.layer)
    before = warmed_up(registries[0], monkeypatch)
    with compiled(monkeypatch) as needed:
        batch.run()
    check({found for found in needed if "logits" in found[0]}, before)


@pytest.mark.parametrize("width", [1, 5, 32])
def test_pages_of_a_request_compile_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many an MXFP4 indexer's scores are made of."""
    registries: list[Any] = []
    batch = indexer_batch.Batch((300,), (1,), fp4=True, build=registered(registries))
    give_pages(batch.layer)
    indexer = batch.layer.indexer
    indexer.k_cache.kv_cache = zeros(3, 64, 68, dtype=torch.uint8)
    before = warmed_up(registries[0], monkeypatch)
    logits = layout.module(f"{KERNELS}.indexer.mqa_logits_mxfp4").mxfp4_paged_mqa_logits
    with compiled(monkeypatch, launch=False) as needed:
        logits(
            zeros(3, 1, indexer.n_head, 64, dtype=torch.int8),
            zeros(3, 1, indexer.n_head, dtype=torch.int32),
            indexer.k_cache.kv_cache,
            zeros(3, indexer.n_head),
            zeros(3, 1, dtype=torch.int32),
            zeros(3, width, dtype=torch.int32),
            None,
            indexer.max_model_len,
        )
    check(needed, before)
