# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""JIT warm-up of DeepSeek-V4's sparse attention and MXFP4 indexer on XPU.

A profile run has no attention metadata and ends before these kernels; a mixed batch
compiles one configuration of each. A launch over rows without keys compiles what
other batches need, and reads no page.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.kernels.xpu_dsv4.indexer.mqa_logits_mxfp4 import (
    mxfp4_mqa_logits,
    mxfp4_paged_mqa_logits,
)
from vllm.model_executor.kernels.xpu_dsv4.mla._decode_config import decode_config
from vllm.model_executor.kernels.xpu_dsv4.mla.sparse_decode import (
    Fp8Output,
    xpu_sparse_decode_fp8,
)
from vllm.model_executor.kernels.xpu_dsv4.mla.sparse_prefill import xpu_sparse_prefill
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv, round_up

if TYPE_CHECKING:
    from vllm.models.deepseek_v4.attention import DeepseekV4Indexer
    from vllm.models.deepseek_v4.xpu.xpu_sparse import DeepseekV4XPUAttention

HEAD_DIM = 512
NOPE_HEAD_DIM = 448
TOKEN_BYTES = 584
INDEXER_HEAD_BYTES = 64
INDEXER_TOKEN_BYTES = 68


@dataclass(frozen=True)
class Pages:
    """Tokens and bytes of a page."""

    block_size: int
    stride: int

    @classmethod
    def of(cls, cache: torch.Tensor) -> "Pages":
        return cls(cache.shape[1], cache.stride(0))

    def empty(self, token_bytes: int = TOKEN_BYTES) -> torch.Tensor:
        return torch.empty_strided(
            (1, self.block_size, token_bytes),
            (self.stride, token_bytes, 1),
            dtype=torch.uint8,
            device=current_platform.device_type,
        )


@dataclass(frozen=True)
class Fp8Operands:
    """Groups of heads of wo_a's product, and the dtype of the RoPE table."""

    num_groups: int
    table_dtype: torch.dtype

    @classmethod
    def of(cls, layer: "DeepseekV4XPUAttention") -> "Fp8Operands | None":
        """What attention writes in `layer`; None is BF16."""
        if not hasattr(layer.wo_a, "bmm_weight"):
            return None
        return cls(layer.n_local_groups, layer.rotary_emb.cos_sin_cache.dtype)


@dataclass(frozen=True)
class SparseDecodeKey:
    num_tokens: int
    num_heads: int
    output: Fp8Operands | None
    swa_width: int
    swa_pages: Pages
    topk_width: int
    pages: Pages | None


@dataclass(frozen=True)
class SparsePrefillKey:
    num_heads: int
    output: Fp8Operands | None


@dataclass(frozen=True)
class Mxfp4LogitsKey:
    num_heads: int


@dataclass(frozen=True)
class PagedMxfp4LogitsKey:
    num_heads: int
    pages: Pages
    max_model_len: int


def _rows(num_tokens: int, num_heads: int) -> torch.Tensor:
    return torch.zeros(
        (num_tokens, num_heads, HEAD_DIM),
        dtype=torch.bfloat16,
        device=current_platform.device_type,
    )


def _output(q: torch.Tensor, operands: Fp8Operands | None) -> torch.Tensor | Fp8Output:
    """Where attention of `q` is written."""
    if operands is None:
        return torch.empty_like(q)
    num_tokens, num_heads, head_dim = q.shape
    width = num_heads // operands.num_groups * head_dim
    shape = (operands.num_groups, num_tokens, width)
    return Fp8Output(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=q.device),
        torch.empty((*shape[:2], width // 128), device=q.device),
        torch.zeros(num_tokens, dtype=torch.int64, device=q.device),
        torch.zeros(
            (1, head_dim - NOPE_HEAD_DIM),
            dtype=operands.table_dtype,
            device=q.device,
        ),
    )


def _no_keys(num_tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of no key, and their numbers."""
    device = current_platform.device_type
    indices = torch.full((num_tokens, 1, width), -1, dtype=torch.int32, device=device)
    return indices, torch.zeros(num_tokens, dtype=torch.int32, device=device)


class XPUSparseDecodeKernel(VllmJitKernel[SparseDecodeKey]):
    """Decode, and the merge of its key splits, in every number of splits."""

    def get_warmup_keys(self, layer: "DeepseekV4XPUAttention") -> list[SparseDecodeKey]:
        pages = None
        topk_width = 0
        if layer.compress_ratio > 1:
            pages = Pages.of(layer.kv_cache)
            # C4A: as many as the indexer chooses; C128A: all there are.
            assert layer.topk_indices_buffer is not None
            topk_width = (
                layer.topk_indices_buffer.shape[-1]
                if layer.compress_ratio == 4
                else round_up(cdiv(layer.max_model_len, layer.compress_ratio), 128)
            )
        # From one of these batches to the next the splits at most halve, so every
        # kernel of decode and of its merge is among them.
        most = layer.max_num_batched_tokens
        batches = [1 << bit for bit in range(most.bit_length())]
        keys: dict[object, SparseDecodeKey] = {}
        for num_tokens in (*batches, most):
            config = decode_config(
                num_tokens,
                layer.n_local_heads,
                topk_width + layer.window_size,
            )
            key = SparseDecodeKey(
                num_tokens,
                layer.n_local_heads,
                Fp8Operands.of(layer),
                layer.window_size,
                Pages.of(layer.swa_cache_layer.kv_cache),
                topk_width,
                pages,
            )
            keys.setdefault(config, key)
        return list(keys.values())

    def compile(self, compile_key: SparseDecodeKey) -> None:
        q = _rows(compile_key.num_tokens, compile_key.num_heads)
        swa_indices, swa_lens = _no_keys(compile_key.num_tokens, compile_key.swa_width)
        kv_cache = topk_indices = topk_lens = None
        if compile_key.pages is not None:
            kv_cache = compile_key.pages.empty()
            topk_indices, topk_lens = _no_keys(
                compile_key.num_tokens, compile_key.topk_width
            )
        xpu_sparse_decode_fp8(
            q=q,
            kv_cache=kv_cache,
            swa_kv_cache=compile_key.swa_pages.empty(),
            swa_only=kv_cache is None,
            topk_indices=topk_indices,
            topk_lens=topk_lens,
            swa_indices=swa_indices,
            swa_lens=swa_lens,
            attn_sink=torch.zeros(compile_key.num_heads, device=q.device),
            softmax_scale=1.0,
            head_dim=HEAD_DIM,
            nope_head_dim=NOPE_HEAD_DIM,
            rope_head_dim=HEAD_DIM - NOPE_HEAD_DIM,
            out=_output(q, compile_key.output),
        )


class XPUSparsePrefillKernel(VllmJitKernel[SparsePrefillKey]):
    """Prefill, which depends on the number of heads alone."""

    def get_warmup_keys(
        self, layer: "DeepseekV4XPUAttention"
    ) -> list[SparsePrefillKey]:
        return [SparsePrefillKey(layer.n_local_heads, Fp8Operands.of(layer))]

    def compile(self, compile_key: SparsePrefillKey) -> None:
        q = _rows(1, compile_key.num_heads)
        indices, lens = _no_keys(1, 128)
        xpu_sparse_prefill(
            q=q,
            kv=_rows(1, 1),
            indices=indices,
            sm_scale=1.0,
            attn_sink=torch.zeros(compile_key.num_heads, device=q.device),
            topk_length=lens,
            out=_output(q, compile_key.output),
        )


def _mxfp4_queries(
    shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, their scales, and the weights of `[..., num_heads]`."""
    device = current_platform.device_type
    q = torch.zeros((*shape, INDEXER_HEAD_BYTES), dtype=torch.int8, device=device)
    scales = torch.zeros(shape, dtype=torch.int32, device=device)
    return q, scales, torch.zeros((1, shape[-1]), device=device)


class XPUMxfp4LogitsKernel(VllmJitKernel[Mxfp4LogitsKey]):
    """The indexer's scores of prefill, which depend on the number of heads alone."""

    def get_warmup_keys(self, indexer: "DeepseekV4Indexer") -> list[Mxfp4LogitsKey]:
        return [Mxfp4LogitsKey(indexer.n_head)]

    def compile(self, compile_key: Mxfp4LogitsKey) -> None:
        q, q_scales, weights = _mxfp4_queries((1, compile_key.num_heads))
        no_keys = torch.zeros(1, dtype=torch.int32, device=q.device)
        mxfp4_mqa_logits(
            q,
            q_scales,
            torch.zeros((1, INDEXER_HEAD_BYTES), dtype=torch.int8, device=q.device),
            torch.zeros(1, dtype=torch.int32, device=q.device),
            weights,
            no_keys,
            no_keys,
        )


class XPUPagedMxfp4LogitsKernel(VllmJitKernel[PagedMxfp4LogitsKey]):
    """The indexer's scores of decode."""

    def get_warmup_keys(
        self, indexer: "DeepseekV4Indexer"
    ) -> list[PagedMxfp4LogitsKey]:
        pages = Pages.of(indexer.k_cache.kv_cache)
        return [PagedMxfp4LogitsKey(indexer.n_head, pages, indexer.max_model_len)]

    def compile(self, compile_key: PagedMxfp4LogitsKey) -> None:
        q, q_scales, weights = _mxfp4_queries((1, 1, compile_key.num_heads))
        no_keys = torch.zeros((1, 1), dtype=torch.int32, device=q.device)
        mxfp4_paged_mqa_logits(
            q,
            q_scales,
            compile_key.pages.empty(INDEXER_TOKEN_BYTES),
            weights,
            no_keys,
            no_keys,
            None,
            compile_key.max_model_len,
        )


XPU_SPARSE_DECODE_KERNEL = XPUSparseDecodeKernel()
XPU_SPARSE_PREFILL_KERNEL = XPUSparsePrefillKernel()
XPU_MXFP4_LOGITS_KERNEL = XPUMxfp4LogitsKernel()
XPU_PAGED_MXFP4_LOGITS_KERNEL = XPUPagedMxfp4LogitsKernel()
