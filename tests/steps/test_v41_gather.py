# SPDX-License-Identifier: Apache-2.0
"""Prefill of V4.1 gathers as many requests at once as 32 bits address."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layout, v41

MILLION = 1 << 20


def layers(folder: Path, length: int, batched: int) -> Any:
    text = {"max_position_embeddings": MILLION}
    options = {"max_model_len": length, "max_num_batched_tokens": batched}
    config = v41.configured(folder, text, **options)
    return v41.built(config).language_model.model.layers


def plan(attn: Any, lens: list[int]) -> list[tuple[int, int, int, int]]:
    """The chunks of requests of which one token each is to be computed."""
    metadata = layout.module("vllm.v1.attention.backends.mla.sparse_swa")
    given = object.__new__(metadata.DeepseekSparseSWAMetadata)
    given.num_prefills = len(lens)
    given.prefill_seq_lens_cpu = torch.tensor(lens)
    given.prefill_query_lens_cpu = torch.ones(len(lens), dtype=torch.int64)
    given.prefill_max_model_len = attn.max_model_len
    given.prefill_window_size = attn.window_size
    given.prefill_max_num_batched_tokens = attn.max_num_batched_tokens
    return given.get_prefill_chunk_plan(  # type: ignore[no-any-return]
        attn.compress_ratio, attn.PREFILL_CHUNK_SIZE, has_compressed=True
    )


@pytest.mark.parametrize(("batched", "together"), [(2048, 3), (8192, 3), (400_000, 2)])
def test_a_million_tokens(batched: int, together: int, tmp_path: Path) -> None:
    """At ratio 1 four such requests do not fit; at ratio 2 they do."""
    _, half, whole, _ = layers(tmp_path, MILLION, batched)
    assert whole.attn.compress_ratio == 1 and half.attn.compress_ratio == 2
    assert half.attn.PREFILL_CHUNK_SIZE == 4
    chunks = plan(whole.attn, [MILLION] * 4)
    assert max(end - start for start, end, *_ in chunks) >= together
    for start, end, _, rows in chunks:
        assert (end - start) * rows * whole.attn.head_dim < 2**31
    rows = MILLION + whole.attn.window_size + batched
    assert whole.attn.PREFILL_CHUNK_SIZE * rows * whole.attn.head_dim <= 2**31


def test_a_row_too_much_for_four(tmp_path: Path) -> None:
    batched = 2048
    rows = 2**31 // (4 * 512)
    _, _, whole, _ = layers(tmp_path, rows - 128 - batched + 1, batched)
    assert whole.attn.window_size == 128 and whole.attn.head_dim == 512
    assert whole.attn.PREFILL_CHUNK_SIZE == 3


@pytest.mark.unchanged
def test_short_contexts_keep_four_requests(tmp_path: Path) -> None:
    for layer in layers(tmp_path, 4096, 2048):
        assert layer.attn.PREFILL_CHUNK_SIZE == 4


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_keep_four_requests() -> None:
    attention = layout.module("vllm.models.deepseek_v41.attention")
    assert attention.DeepseekV4Attention.PREFILL_CHUNK_SIZE == 4
