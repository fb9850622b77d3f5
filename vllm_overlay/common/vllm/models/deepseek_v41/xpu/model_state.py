# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rows that V4.1's later layers compute in a step, on XPU."""

from typing import Any

import numpy as np
import torch

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, create_forward_context
from vllm.models.deepseek_v41.decoder_replay_layers import ReplayBatch
from vllm.models.deepseek_v41.nvidia.model_state import (
    DeepseekV41ModelState,
    ReplayAttnMetadata,
)
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata
from vllm.v1.worker.utils import AttentionGroup


class DeepseekV41XPUModelState(DeepseekV41ModelState):
    """Later layers compute the rows of a prompt from `NewRequestData.replay_start` on.

    Before it they have no keys, so their windows begin there. A chunk that ends before
    it leaves them its last row, as a batch has rows of each request; nothing reads what
    they make of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._later_start_np = np.zeros(self.max_num_reqs, dtype=np.int32)
        self._later_start = torch.zeros(
            self.max_num_reqs, dtype=torch.int32, device=self.device
        )
        self._later_start_staging = UvaBufferPool(self.max_num_reqs, torch.int32)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        # The layers up to the last KV source have all keys.
        self._replay_start_np[req_index] = 0
        self._later_start_np[req_index] = new_req_data.replay_start

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
        model_specific_attn_metadata: ModelSpecificAttnMetadata | None = None,
    ) -> dict[str, Any]:
        attn_metadata = super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture,
            ubatch_idx,
            model_specific_attn_metadata,
        )
        layers = self.decoder_replay_layers
        if (
            layers is None
            or for_capture
            or cudagraph_mode != CUDAGraphMode.PIECEWISE
            or not (start := self._starts_of(input_batch)).any()
        ):
            return attn_metadata
        # Graphs keep the whole batch; what they attend to is not part of them.
        later = self._metadata_of(
            input_batch,
            start,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
        )
        windows = {
            name: later[name]
            for name in layers.metadata_prefixes - {layers.first_swa_prefix}
            if isinstance(later[name], DeepseekSparseSWAMetadata)
        }
        return attn_metadata | windows

    def _starts_of(self, input_batch: InputBatch) -> np.ndarray:
        """From where later layers have keys, `[num_reqs]`; 0 for a request that has
        read its prompt, whose windows begin behind that place."""
        num_reqs = input_batch.num_reqs
        slots = input_batch.idx_mapping_np[:num_reqs]
        prefilling = input_batch.is_prefilling_np[:num_reqs]
        return np.where(prefilling, self._later_start_np[slots], 0).astype(np.int32)

    def _prepare_replay_batch(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        replay_start: torch.Tensor,
        capture_desc: Any = None,
    ) -> None:
        """Set the later layers' batch of this step; none if they compute all rows with
        all keys, and in graphs."""
        layers = self.decoder_replay_layers
        assert layers is not None and capture_desc is None
        layers.replay_batch = None
        if cudagraph_mode != CUDAGraphMode.NONE:
            return
        start = self._starts_of(input_batch)
        if not start.any():
            return
        num_reqs = input_batch.num_reqs
        query_lens = np.diff(input_batch.query_start_loc_np[: num_reqs + 1])
        seq_lens = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
        needed = np.where(start > 0, np.maximum(seq_lens - start, 1), query_lens)
        kept_lens = np.minimum(query_lens, needed)
        kv_start = np.where(seq_lens > start, start, seq_lens - kept_lens)

        num_tokens = int(kept_lens.sum())
        kept_batch, kept_slot_mappings = self._kept_input_batch(
            input_batch, slot_mappings, replay_start, kept_lens, num_tokens
        )
        layers.replay_batch = ReplayBatch(
            self._kept_rows[:num_tokens],
            create_forward_context(
                self._metadata_of(
                    kept_batch,
                    kv_start.astype(np.int32),
                    block_tables,
                    kept_slot_mappings,
                    attn_groups,
                    kv_cache_config,
                ),
                self.vllm_config,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
                slot_mapping=build_slot_mappings_by_layer(
                    kept_slot_mappings, kv_cache_config
                ),
            ),
        )

    def _metadata_of(
        self,
        input_batch: InputBatch,
        start: np.ndarray,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
    ) -> dict[str, Any]:
        """Metadata of the last KV source and the layers behind it, whose windows begin
        at `start`; the source's at the prompt's begin."""
        layers = self.decoder_replay_layers
        assert layers is not None
        if self._replay_attn_groups is None:
            self._replay_attn_groups = (
                self._copy_attn_groups(attn_groups, layers.metadata_prefixes),
                self._copy_attn_groups(attn_groups, {layers.first_swa_prefix}),
            )
        num_reqs = input_batch.num_reqs
        starts = self._later_start_staging.copy_to_gpu(
            start, out=self._later_start[:num_reqs]
        )
        later, first = (
            DefaultModelState.prepare_attn(
                self,
                input_batch,
                CUDAGraphMode.NONE,
                block_tables,
                slot_mappings,
                groups,
                kv_cache_config,
                model_specific_attn_metadata=ReplayAttnMetadata(begin),
            )
            for groups, begin in zip(
                self._replay_attn_groups, (starts, self._replay_start)
            )
        )
        return later | {layers.first_swa_prefix: first[layers.first_swa_prefix]}
