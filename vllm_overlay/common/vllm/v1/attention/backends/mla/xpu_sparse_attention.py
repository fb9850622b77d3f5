# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One DeepSeek-V4 attention step on XPU: decode tokens first, then prefill."""

from typing import cast

import torch

from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
from vllm.v1.attention.backends.mla.xpu_sparse_decode import (
    SparseMLALayer,
    decode_workspace,
    sparse_decode,
)
from vllm.v1.attention.backends.mla.xpu_sparse_prefill import (
    prefill_workspace,
    sparse_prefill,
)


def sparse_attention(
    layer: SparseMLALayer, q: torch.Tensor, output: torch.Tensor
) -> None:
    """Attention of a batch over the pages of `layer`, into `output`.

    Without metadata, which is vLLM's warm-up run, it reserves the workspace of decode
    and prefill, which share it one after the other, and gives zeros.

    Args:
        layer: the attention layer, with its caches bound.
        q: rotated queries, decode tokens first, `[tokens, heads, 512]`, bf16.
        output: `[tokens, heads, 512]`, bf16, written in place.
    """
    assert output.shape == q.shape, f"output is {output.shape}, q is {q.shape}"
    assert output.dtype == q.dtype, f"output is {output.dtype}, q is {q.dtype}"
    metadata = get_forward_context().attn_metadata
    if metadata is None:
        prefill_workspace(layer)
        decode_workspace(layer)
        output.zero_()
        return

    assert isinstance(metadata, dict)
    swa = cast(DeepseekSparseSWAMetadata, metadata[layer.swa_cache_layer.prefix])
    own = cast(FlashMLASparseMetadata | None, metadata.get(layer.prefix))
    # Tokens, not requests: a request may bring none.
    prefill_start = swa.num_decode_tokens
    prefill_end = prefill_start + swa.num_prefill_tokens
    if prefill_start > 0:
        sparse_decode(layer, q[:prefill_start], swa, own, output[:prefill_start])
    if prefill_end > prefill_start:
        prefill = slice(prefill_start, prefill_end)
        sparse_prefill(layer, q[prefill], swa, own, output[prefill])
