# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek-V4's sparse MLA on XPU: what the shared layer asks of its platform."""

from typing import TYPE_CHECKING

import torch

from vllm.models.deepseek_v4.nvidia.flashmla import (
    DeepseekV4FlashMLASparseBackend,
    DeepseekV4SparseMLAAttentionImpl,
)
from vllm.v1.attention.backends.mla.xpu_sparse_attention import sparse_attention

if TYPE_CHECKING:
    from vllm.models.deepseek_v4.attention import DeepseekV4MLAAttention


class DeepseekV4XPUSparseBackend(DeepseekV4FlashMLASparseBackend):
    """FlashMLA's page layout and metadata, attended to by Triton kernels."""

    @staticmethod
    def get_name() -> str:
        return "XPU_V4_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type["DeepseekV4XPUAttention"]:
        return DeepseekV4XPUAttention


class DeepseekV4XPUAttention(DeepseekV4SparseMLAAttentionImpl):
    """Sparse MLA of ``DeepseekV4MLAAttention`` on XPU."""

    backend_cls = DeepseekV4XPUSparseBackend

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    @classmethod
    def forward_mqa(  # type: ignore[override]
        cls,
        layer: "DeepseekV4MLAAttention",
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        sparse_attention(layer, q, output)
