# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek-V4's sparse MLA on XPU."""

from typing import Any

import torch

from vllm.model_executor.layers.deepseek_v4_attention import DeepseekV4MLAAttention
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    DeepseekV4FlashMLASparseBackend,
)
from vllm.v1.attention.backends.mla.xpu_sparse_attention import sparse_attention


class DeepseekV4XPUSparseBackend(DeepseekV4FlashMLASparseBackend):
    """FlashMLA's page layout and metadata, attended to by Triton kernels."""

    @staticmethod
    def get_name() -> str:
        return "XPU_V4_MLA_SPARSE"


class DeepseekV4XPUAttention(DeepseekV4MLAAttention):
    """Sparse MLA on XPU, over as many heads as the rank has."""

    def __init__(self, num_heads: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_heads, *args, **kwargs)
        self.padded_heads = num_heads

    def get_attn_backend(self) -> type[DeepseekV4XPUSparseBackend]:
        return DeepseekV4XPUSparseBackend

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        sparse_attention(self, q, output)
