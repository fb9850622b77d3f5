# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek-V4's sparse prefill on XPU: gather the keys of a few requests in bf16,
then attend to them."""

from typing import TYPE_CHECKING

import torch

from vllm.model_executor.kernels.xpu_dsv4.indexer.topk_indices import (
    WIDTH_MULTIPLE,
    combine_topk_swa_indices,
)
from vllm.model_executor.kernels.xpu_dsv4.kv.gather import dequantize_and_gather_k_cache
from vllm.model_executor.kernels.xpu_dsv4.mla.sparse_prefill import xpu_sparse_prefill
from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.worker.workspace import current_workspace_manager

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
    from vllm.v1.attention.backends.mla.xpu_sparse_decode import SparseMLALayer

# Requests whose keys are gathered at a time; it bounds the workspace.
PREFILL_CHUNK_SIZE = 4


def _compressed_rows(layer: "SparseMLALayer") -> int:
    """Rows for the compressed entries of the longest request."""
    if layer.compress_ratio <= 1:
        return 0
    return cdiv(layer.max_model_len, layer.compress_ratio)


def prefill_workspace(layer: "SparseMLALayer") -> list[torch.Tensor]:
    """Scratch of one prefill step, from vLLM's workspace. Called in the warm-up run, it
    reserves what every later step needs.

    A request's rows are its compressed entries, then the raw tokens that its new
    tokens see: at most all tokens of a step and a window before them.

    Returns:
        Where keys are gathered, `[requests, rows, 512]`, bf16; the rows that each token
        reads, `[max tokens, width]`, and their numbers, `[max tokens]`, int32.
    """
    tokens = layer.max_num_batched_tokens
    entries = _compressed_rows(layer)
    rows = entries + layer.window_size + tokens
    if layer.compress_ratio == 4:
        assert layer.topk_indices_buffer is not None
        entries = layer.topk_indices_buffer.shape[1]
    width = round_up(entries + layer.window_size, WIDTH_MULTIPLE)
    return current_workspace_manager().get_simultaneous(
        ((PREFILL_CHUNK_SIZE, rows, layer.head_dim), torch.bfloat16),
        ((tokens, width), torch.int32),
        ((tokens,), torch.int32),
    )


def sparse_prefill(
    layer: "SparseMLALayer",
    q: torch.Tensor,
    swa_metadata: "DeepseekSparseSWAMetadata",
    attn_metadata: "FlashMLASparseMetadata | None",
    output: torch.Tensor,
) -> None:
    """Attention of the prefill tokens, into `output`.

    Args:
        layer: the attention layer, with its caches bound.
        q: rotated queries of the prefill tokens, `[tokens, heads, 512]`, bf16.
        swa_metadata: of the window cache.
        attn_metadata: of the layer's own cache; None in window-only layers.
        output: `[tokens, heads, 512]`, bf16, written in place.
    """
    num_decodes = swa_metadata.num_decodes
    seq_lens = swa_metadata.prefill_seq_lens
    gather_lens = swa_metadata.prefill_gather_lens
    query_start_loc = swa_metadata.query_start_loc
    assert seq_lens is not None and gather_lens is not None
    assert query_start_loc is not None and swa_metadata.query_start_loc_cpu is not None
    query_start_loc = query_start_loc[num_decodes:]
    starts = swa_metadata.query_start_loc_cpu[num_decodes:].tolist()
    chosen, topk = _chosen_entries(layer, swa_metadata, attn_metadata)
    width = round_up(topk + layer.window_size, WIDTH_MULTIPLE)

    compressed_rows = _compressed_rows(layer)
    gathered, indices_out, lens_out = prefill_workspace(layer)
    for first in range(0, swa_metadata.num_prefills, PREFILL_CHUNK_SIZE):
        last = min(first + PREFILL_CHUNK_SIZE, swa_metadata.num_prefills)
        requests = slice(first, last)
        in_batch = slice(num_decodes + first, num_decodes + last)
        tokens = slice(starts[first] - starts[0], starts[last] - starts[0])
        count = tokens.stop - tokens.start
        keys = gathered[: last - first]
        if attn_metadata is not None:
            dequantize_and_gather_k_cache(
                keys,
                layer.kv_cache,
                seq_lens=seq_lens[requests] // layer.compress_ratio,
                gather_lens=None,
                block_table=attn_metadata.block_table[in_batch],
                block_size=attn_metadata.block_size // layer.compress_ratio,
                offset=0,
            )
        dequantize_and_gather_k_cache(
            keys,
            layer.swa_cache_layer.kv_cache,
            seq_lens=seq_lens[requests],
            gather_lens=gather_lens[requests],
            block_table=swa_metadata.block_table[in_batch],
            block_size=swa_metadata.block_size,
            offset=compressed_rows,
        )
        indices, lens = combine_topk_swa_indices(
            chosen[tokens],
            query_start_loc[first : last + 1],
            seq_lens[requests],
            gather_lens[requests],
            layer.window_size,
            layer.compress_ratio,
            topk,
            M=gathered.shape[1],
            N=compressed_rows,
            out=(indices_out[:count, :width], lens_out[:count]),
        )
        xpu_sparse_prefill(
            q=q[tokens],
            kv=keys.view(-1, 1, layer.head_dim),
            indices=indices,
            sm_scale=layer.scale,
            attn_sink=layer.attn_sink,
            topk_length=lens,
            out=output[tokens],
        )


def _chosen_entries(
    layer: "SparseMLALayer",
    swa_metadata: "DeepseekSparseSWAMetadata",
    attn_metadata: "FlashMLASparseMetadata | None",
) -> tuple[torch.Tensor, int]:
    """Compressed entries of each prefill token, `[tokens, width]` int32, and how
    many of them count at most."""
    if layer.compress_ratio > 4:
        # Built with the metadata, since no indexer chooses among them.
        assert attn_metadata is not None
        chosen = attn_metadata.c128a_prefill_topk_indices
        assert chosen is not None
        return chosen, chosen.shape[1]
    assert layer.topk_indices_buffer is not None
    decode_tokens = swa_metadata.num_decode_tokens
    chosen = layer.topk_indices_buffer[decode_tokens:]
    chosen = chosen[: swa_metadata.num_prefill_tokens]
    return chosen, 0 if layer.compress_ratio <= 1 else chosen.shape[1]
