# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA of DeepSeek V4.1 on XPU: V4's, with other compressed entries."""

from typing import Any

import torch

from vllm.models.deepseek_v4.xpu.xpu_sparse import XPUSparseMLA
from vllm.models.deepseek_v41.attention import DeepseekV4Attention
from vllm.models.deepseek_v41.common.ops import combine_topk_swa_indices
from vllm.models.deepseek_v41.common.ops.cache_utils import (
    _COMBINE_TOPK_SWA_INDICES_KERNEL,
)
from vllm.models.deepseek_v41.sparse_mla import (
    DeepseekV4SparseMLABackend,
    DeepseekV41SparseSWAMetadataBuilder,
)
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend


class DeepseekV41XPUSparseBackend(DeepseekV4SparseMLABackend):
    @staticmethod
    def get_name() -> str:
        return "XPU_V41_MLA_SPARSE"


class DeepseekV41XPUSparseSWABackend(DeepseekSparseSWABackend):
    @staticmethod
    def get_builder_cls() -> type[DeepseekV41SparseSWAMetadataBuilder]:
        return DeepseekV41SparseSWAMetadataBuilder


class DeepseekV41XPUAttention(XPUSparseMLA, DeepseekV4Attention):
    """XPU sparse MLA attention layer for DeepSeek V4.1.

    A layer of ratio 1 or 2 reads the entries that the last index source chose in the
    cache of the last KV source.
    """

    backend_cls = DeepseekV41XPUSparseBackend
    swa_backend_cls = DeepseekV41XPUSparseSWABackend
    norms_query = False
    # It keeps what the candidates left unchosen, and begins no window before the
    # gathered rows.
    combine_topk_swa_indices = staticmethod(combine_topk_swa_indices)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _COMBINE_TOPK_SWA_INDICES_KERNEL.register_warmup()
        # wo_a becomes BF16 when it is loaded: the batched product takes no scales of
        # 32 values.
        self.wo_a.is_bmm = False

    def reads_compressed(self) -> bool:
        return self.compress_ratio > 0

    def reads_indexer(self) -> bool:
        return self.compress_ratio > 0

    def compressed_cache(self) -> tuple[str, torch.Tensor]:
        assert self.compressed_cache_prefix is not None
        return self.compressed_cache_prefix, self._compressed_kv_cache()
