# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""JIT warm-up of what DeepSeek V4.1 has besides V4's kernels on XPU.

The profile run has the largest batch and ends before the caches are read, and the mixed
batch of the warm-up has contexts so short that indexers choose all of them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.config import VllmConfig
from vllm.model_executor.kernels.attention.dsa.candidate_blocks import (
    apply_candidate_mask,
    select_candidate_blocks,
)
from vllm.model_executor.kernels.xpu_dsv4.indexer.mqa_logits import fp8_paged_mqa_logits
from vllm.model_executor.kernels.xpu_dsv4.mhc.mhc_delayed import (
    mhc_fused_post_pre_delayed,
    mhc_pre_delayed,
)
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.models.deepseek_v4.xpu.jit_warmup import Pages
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.models.deepseek_v41.attention import DeepseekV4Indexer

STREAMS = 4
GATES = (2 + STREAMS) * STREAMS
INDEX_SCALE_BYTES = 4


@dataclass(frozen=True)
class DelayedMhcKey:
    num_tokens: int
    hidden_size: int
    sinkhorn_iters: int


@dataclass(frozen=True)
class PagedLogitsKey:
    num_heads: int
    head_dim: int
    pages: Pages
    max_model_len: int


@dataclass(frozen=True)
class CandidatesKey:
    width: int
    gathered: bool
    topk_blocks: int
    block_size: int
    writes: bool


class XPUDelayedMhcKernel(VllmJitKernel[DelayedMhcKey]):
    """Hyper-connections, whose tiles depend on the number of tokens."""

    def get_warmup_keys(self, vllm_config: VllmConfig) -> list[DelayedMhcKey]:
        config = vllm_config.model_config.hf_text_config
        # The least batch of each tiling.
        return [
            DelayedMhcKey(num_tokens, config.hidden_size, config.hc_sinkhorn_iters)
            for num_tokens in (1, 65, 513)
            if num_tokens <= vllm_config.scheduler_config.max_num_batched_tokens
        ]

    def compile(self, compile_key: DelayedMhcKey) -> None:
        tokens, hidden = compile_key.num_tokens, compile_key.hidden_size

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=current_platform.device_type)

        x = zeros(tokens, hidden, dtype=torch.bfloat16)
        norm = zeros(hidden, dtype=torch.bfloat16)
        streams = zeros(tokens, STREAMS, hidden, dtype=torch.bfloat16)
        fn, scale, base = zeros(GATES, STREAMS * hidden), zeros(3), zeros(GATES)
        numbers = (1e-6, 1e-6, 1e-6, 2.0, compile_key.sinkhorn_iters)
        pre, post = zeros(tokens, STREAMS), zeros(tokens, STREAMS, 1)
        comb = zeros(tokens, STREAMS, STREAMS)
        mixes = {"pre_mix": pre, "norm_weight": norm}
        # The model's first layer, one after Engram, and all others.
        entry = fn[:, :hidden].contiguous()
        mhc_pre_delayed(streams, entry, scale, base, *numbers, x=x, norm_weight=norm)
        mhc_pre_delayed(streams, fn, scale, base, *numbers, **mixes)
        mhc_fused_post_pre_delayed(
            x, streams, post, comb, fn, scale, base, *numbers, **mixes
        )


class XPUPagedLogitsKernel(VllmJitKernel[PagedLogitsKey]):
    """The indexer's scores of decode, in pages that the op of XPU does not take."""

    def get_warmup_keys(self, indexer: "DeepseekV4Indexer") -> list[PagedLogitsKey]:
        pages = Pages.of(indexer.k_cache.kv_cache)
        if pages.block_size == 64:
            return []
        op = indexer.indexer_op
        return [
            PagedLogitsKey(indexer.n_head, indexer.head_dim, pages, op.max_model_len)
        ]

    def compile(self, compile_key: PagedLogitsKey) -> None:
        device = current_platform.device_type
        shape = (1, 1, compile_key.num_heads, compile_key.head_dim)
        width = compile_key.head_dim + INDEX_SCALE_BYTES
        fp8_paged_mqa_logits(
            torch.zeros(shape, dtype=torch.uint8, device=device).view(
                torch.float8_e4m3fn
            ),
            compile_key.pages.empty(token_bytes=width),
            torch.zeros((1, compile_key.num_heads), device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros((1, 1), dtype=torch.int32, device=device),
            None,
            compile_key.max_model_len,
        )


class XPUCandidatesKernel(VllmJitKernel[CandidatesKey]):
    """The blocks of entries that an indexer chooses, or keeps to."""

    def get_warmup_keys(self, indexer: "DeepseekV4Indexer") -> list[CandidatesKey]:
        op = indexer.indexer_op
        if op.candidate_blocks is None:
            return []
        size = op.candidate_block_size
        # Of gathered keys Triton tells 1, multiples of 16 and other numbers apart, and
        # of their blocks as well.
        gathered = {16 * size, 15 * size + 1, 2 * size, 2 * size + 1, size, size - 1, 1}
        return [
            CandidatesKey(
                width,
                is_gathered,
                op.candidate_blocks.shape[1],
                size,
                op.candidate_write,
            )
            for width, is_gathered in (
                *((width, True) for width in sorted(gathered - {0})),
                (op.max_model_len, False),
            )
        ]

    def compile(self, compile_key: CandidatesKey) -> None:
        device = current_platform.device_type
        logits = torch.zeros((1, compile_key.width), device=device)
        starts = torch.zeros(1, dtype=torch.int32, device=device)
        blocks = torch.zeros(
            (1, compile_key.topk_blocks), dtype=torch.int32, device=device
        )
        bounds = (starts if compile_key.gathered else None, torch.ones_like(starts))
        if compile_key.writes:
            select_candidate_blocks(
                logits,
                *bounds,
                compile_key.topk_blocks,
                compile_key.block_size,
                blocks,
            )
        else:
            apply_candidate_mask(logits, *bounds, blocks, compile_key.block_size)


XPU_DELAYED_MHC_KERNEL = XPUDelayedMhcKernel()
XPU_PAGED_LOGITS_KERNEL = XPUPagedLogitsKernel()
XPU_CANDIDATES_KERNEL = XPUCandidatesKernel()
