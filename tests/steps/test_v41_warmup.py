# SPDX-License-Identifier: Apache-2.0
"""The JIT warm-up compiles what V4.1 has besides V4's kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import layout, v41
from helpers.compilations import check, compiled, warmed_up

CANDIDATES = "vllm.model_executor.kernels.attention.dsa.candidate_blocks"
LENGTH = 4096


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, set[Any]]:
    """The layers of a model with pages, and what its warm-up compiles."""
    folder = tmp_path_factory.mktemp("v41")
    config = v41.configured(folder, max_model_len=LENGTH, enforce_eager=False)
    warmup = layout.module("vllm.model_executor.warmup.jit_warmup")
    registry = warmup.JitWarmupRegistry(config)
    with registry.activate():
        layers = v41.built(config).language_model.model.layers
    for layer in layers:
        attn = layer.attn
        give_pages(attn.swa_cache_layer, 32, 584)
        if attn.compressor is not None:
            give_pages(attn, 128 // attn.compress_ratio, 584)
        if attn.indexer is not None and attn.indexer.owns_k:
            give_pages(attn.indexer.k_cache, 128 // attn.compress_ratio, 132)
    with pytest.MonkeyPatch.context() as patch:
        return layers, warmed_up(registry, patch)


@pytest.fixture
def layers(warmed: tuple[Any, set[Any]]) -> Any:
    return warmed[0]


Hold = Callable[[Callable[[], Any]], None]


@pytest.fixture
def hold(warmed: tuple[Any, set[Any]], monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Hold a request to the warm-up."""

    def run(request: Callable[[], Any]) -> None:
        with compiled(monkeypatch, launch=False) as needed:
            request()
        check(needed, warmed[1])

    return run


def give_pages(cache: Any, tokens: int, width: int) -> None:
    cache.kv_cache = torch.zeros(
        (3, tokens, width), dtype=torch.uint8, device=layout.device()
    )


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=layout.device())


@pytest.mark.parametrize("tokens", [3, 64, 100, 512, 700])
def test_hyper_connections(tokens: int, layers: Any, hold: Hold) -> None:
    """Of the first layer, and of every other sublayer."""
    layer, width = layers[0], layers[0].hidden_size
    model = layout.module("vllm.models.deepseek_v41.nvidia.model")
    x = zeros(tokens, width, dtype=torch.bfloat16)
    streams = x[:, None].expand(-1, 4, -1)
    gates = (layer.hc_attn_scale, layer.hc_attn_base, 1e-20, 1e-6, 1e-6, 2.0, 20)
    norm = {"norm_weight": layer.attn_norm.weight, "norm_eps": 1e-20}
    entry = layer.hc_attn_fn.unflatten(1, (4, -1)).sum(1)
    hold(lambda: model.mhc_pre_delayed_tilelang(streams, entry, *gates, x=x, **norm))
    mixes = zeros(tokens, 4, 1), zeros(tokens, 4, 4)
    hold(
        lambda: model.mhc_shifted_post_pre(
            x,
            streams.contiguous(),
            *mixes,
            layer.hc_attn_fn,
            *gates,
            pre_mix=zeros(tokens, 4),
            **norm,
        )
    )


@pytest.mark.parametrize("requests", [1, 5, 16])
def test_scores_of_decode(requests: int, layers: Any, hold: Hold) -> None:
    indexer = layers[2].attn.indexer
    q = zeros(requests, 1, indexer.n_head, indexer.head_dim, dtype=torch.uint8)
    hold(
        lambda: torch.ops.vllm.xpu_fp8_paged_mqa_logits(
            q.view(torch.float8_e4m3fn),
            indexer.k_cache.kv_cache,
            zeros(requests, indexer.n_head),
            zeros(requests, dtype=torch.int32),
            zeros(requests, 7, dtype=torch.int32),
            zeros(1, dtype=torch.int32),
            indexer.indexer_op.max_model_len,
        )
    )


@pytest.mark.parametrize("width", [1, 7, 8, 16, 100, 128, 250, 1024, LENGTH])
def test_candidates(width: int, layers: Any, hold: Hold) -> None:
    """Of gathered keys, and of decode over the longest context."""
    module = layout.module(CANDIDATES)
    ends = zeros(2, dtype=torch.int32)
    starts = None if width == LENGTH else zeros(2, dtype=torch.int32)
    for layer, function in (
        (2, "select_candidate_blocks"),
        (3, "apply_candidate_mask"),
    ):
        op = layers[layer].attn.indexer.indexer_op
        blocks = op.candidate_blocks[:2]
        size = op.candidate_block_size
        chosen = (blocks.shape[1], size, blocks) if layer == 2 else (blocks, size)
        arguments = (zeros(2, width), starts, ends, *chosen)
        hold(lambda: getattr(module, function)(*arguments))  # noqa: B023


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_register_nothing() -> None:
    model = layout.module("vllm.models.deepseek_v41.nvidia.model")
    assert not hasattr(model, "XPU_DELAYED_MHC_KERNEL")
