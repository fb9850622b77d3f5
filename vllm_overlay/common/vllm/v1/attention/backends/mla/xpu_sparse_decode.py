# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek-V4's sparse decode on XPU: attention straight from the FP8 pages."""

from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from vllm.model_executor.kernels.xpu_dsv4.indexer.topk_indices import (
    compute_global_topk_indices_and_lens,
)
from vllm.model_executor.kernels.xpu_dsv4.mla.sparse_decode import (
    sparse_decode_workspace_size,
    xpu_sparse_decode_fp8,
)
from vllm.v1.worker.workspace import current_workspace_manager

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata
    from vllm.v1.attention.backends.mla.sparse_swa import (
        DeepseekSparseSWAMetadata,
        DeepseekV4SWACache,
    )


class SparseMLALayer(Protocol):
    """What decode and prefill read of a DeepSeek-V4 attention layer."""

    prefix: str
    num_heads: int
    head_dim: int
    nope_head_dim: int
    rope_head_dim: int
    scale: float
    window_size: int
    compress_ratio: int
    max_model_len: int
    max_num_batched_tokens: int
    attn_sink: torch.Tensor
    kv_cache: torch.Tensor
    swa_cache_layer: "DeepseekV4SWACache"
    topk_indices_buffer: torch.Tensor | None


@cache
def _partials(max_num_tokens: int, num_heads: int) -> int:
    """fp32 elements for the key splits of any decode up to these sizes. The splits
    are bounded, so that no number of keys needs more."""
    return sparse_decode_workspace_size(
        max_num_tokens, num_heads, max_keys=torch.iinfo(torch.int32).max
    )


def decode_workspace(layer: SparseMLALayer) -> list[torch.Tensor]:
    """Scratch of one decode step, from vLLM's workspace. Called in the warm-up run,
    it reserves what every later step needs.

    Returns:
        The partials of the key splits, fp32. At ratio 4 also the slots of the chosen
        entries, `[max tokens, top-k]`, and their numbers, `[max tokens]`, int32.
    """
    tokens = layer.max_num_batched_tokens
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((_partials(tokens, layer.num_heads),), torch.float32)
    ]
    if layer.compress_ratio == 4:
        assert layer.topk_indices_buffer is not None
        topk = layer.topk_indices_buffer.shape[1]
        shapes += [((tokens, topk), torch.int32), ((tokens,), torch.int32)]
    return current_workspace_manager().get_simultaneous(*shapes)


def sparse_decode(
    layer: SparseMLALayer,
    q: torch.Tensor,
    swa_metadata: "DeepseekSparseSWAMetadata",
    attn_metadata: "FlashMLASparseMetadata | None",
    output: torch.Tensor,
) -> None:
    """Attention of the decode tokens, into `output`.

    Every token is a row of its own with its own keys, so that requests may have
    several tokens. Neither waits for the device nor allocates.

    Args:
        layer: the attention layer, with its caches bound.
        q: rotated queries of the decode tokens, `[tokens, heads, 512]`, bf16.
        swa_metadata: of the window cache.
        attn_metadata: of the layer's own cache; None in window-only layers.
        output: `[tokens, heads, 512]`, bf16, written in place.
    """
    tokens = q.shape[0]
    partials, *chosen = decode_workspace(layer)
    kv_cache = topk_indices = topk_lens = None
    if layer.compress_ratio > 1:
        assert attn_metadata is not None
        kv_cache = layer.kv_cache
        if layer.compress_ratio == 4:
            assert layer.topk_indices_buffer is not None
            assert swa_metadata.token_to_req_indices is not None
            assert swa_metadata.is_valid_token is not None
            slots, lens = chosen
            topk_indices, topk_lens = compute_global_topk_indices_and_lens(
                layer.topk_indices_buffer[:tokens],
                swa_metadata.token_to_req_indices[:tokens],
                attn_metadata.block_table[: swa_metadata.num_decodes],
                attn_metadata.block_size // layer.compress_ratio,
                swa_metadata.is_valid_token[:tokens],
                out=(slots[:tokens], lens[:tokens]),
            )
        else:
            topk_indices = attn_metadata.c128a_global_decode_topk_indices
            topk_lens = attn_metadata.c128a_decode_topk_lens

    swa_indices = swa_metadata.decode_swa_indices
    swa_lens = swa_metadata.decode_swa_lens
    assert swa_indices is not None and swa_lens is not None
    xpu_sparse_decode_fp8(
        q=q,
        kv_cache=kv_cache,
        swa_kv_cache=layer.swa_cache_layer.kv_cache,
        swa_only=kv_cache is None,
        topk_indices=topk_indices,
        topk_lens=topk_lens,
        swa_indices=swa_indices,
        swa_lens=swa_lens,
        attn_sink=layer.attn_sink,
        softmax_scale=layer.scale,
        head_dim=layer.head_dim,
        nope_head_dim=layer.nope_head_dim,
        rope_head_dim=layer.rope_head_dim,
        out=output,
        workspace=partials,
    )
