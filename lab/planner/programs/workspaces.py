# SPDX-License-Identifier: Apache-2.0
"""The workspaces that a release's warm-up run reserves, of models on "meta"."""

import math
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import vllm.envs as envs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.platforms import current_platform

STEP = 256
"""Bytes at a multiple of which vLLM lays the parts of a workspace."""


class Asked:
    """In place of vLLM's manager: how many bytes somebody wanted at once, at most."""

    most = 0

    def get_simultaneous(
        self, *wanted: tuple[tuple[int, ...], torch.dtype]
    ) -> list[torch.Tensor]:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        self.most = max(self.most, sum(-(-size // STEP) * STEP for size in sizes))
        return [torch.empty(s, dtype=d, device="meta") for s, d in wanted]


def reserved(models: Iterable[torch.nn.Module], vllm_config: Any) -> int:
    """Bytes of the one workspace that all layers share, and of the indexer's scores."""
    asked, scores = Asked(), 0
    for module in (part for model in models for part in model.modules()):
        if hasattr(module, "_prefill_workspace"):
            attend(module, asked, vllm_config)
        if isinstance(module, sparse_attn_indexer.SparseAttnIndexer):
            scores = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20
            asked.get_simultaneous(*gathered(module))
    return asked.most + scores


def attend(layer: Any, asked: Asked, vllm_config: Any) -> None:
    """Run attention as the warm-up run does, without metadata."""
    names = type(layer).forward_mqa.__globals__
    q = torch.empty(1, 1, 1, dtype=torch.bfloat16, device="meta")
    with (
        mock.patch.dict(names, current_workspace_manager=lambda: asked),
        set_forward_context(None, vllm_config),
    ):
        layer.forward_mqa(q, None, None, torch.empty_like(q))


def gathered(indexer: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What prefill gathers of the keys of all requests, and the top-k's own scratch."""
    values, scales = sparse_attn_indexer._gather_workspace_shapes(
        indexer.max_total_seq_len,
        indexer.head_dim,
        current_platform.fp8_dtype(),
        indexer.use_fp4_cache,
    )
    scratch = sparse_attn_indexer.RADIX_TOPK_WORKSPACE_SIZE
    return [values, scales, ((scratch,), torch.uint8)]
