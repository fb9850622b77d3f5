# SPDX-License-Identifier: Apache-2.0
"""The JIT warm-up compiles every kernel that attention needs for a request."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import indexer_batch, layout, model_layers
from helpers.attention_batch import Batch, random_sinks
from helpers.compilations import check, compiled, warmed_up


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
