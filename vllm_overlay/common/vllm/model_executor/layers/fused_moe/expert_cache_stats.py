# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hits, misses and bytes of routed experts in host memory, for the engine's metrics."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.fused_moe.expert_cache import cached_layers
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import ExpertCacheStats

if TYPE_CHECKING:
    from vllm.v1.executor import Executor
    from vllm.v1.worker.worker_base import WorkerBase

INTERVAL = 5.0
"""Seconds between two looks at busy workers: each waits for the steps that run."""


class ExpertCacheReader:
    """Reads what the workers' devices count: at times, and when the engine gets idle.

    Args:
        executor: of the workers, whose layers have slots.

    """

    def __init__(self, executor: "Executor") -> None:
        self.executor = executor
        self.last = self._read()

    def attach(self, outputs: Mapping[int, EngineCoreOutputs], is_idle: bool) -> None:
        """Add what was counted since the last time to the statistics of a step."""
        every = (one.scheduler_stats for one in outputs.values())
        stats = next((one for one in every if one is not None), None)
        if stats is None or not (is_idle or time.monotonic() >= self.next):
            return
        found = self._read()
        queries, hits, read = (n - o for n, o in zip(found, self.last, strict=True))
        stats.expert_cache_stats = ExpertCacheStats(queries, hits, read)
        self.last = found

    def _read(self) -> list[int]:
        self.next = time.monotonic() + INTERVAL
        counted = self.executor.collective_rpc(count_experts)
        return [sum(of_all) for of_all in zip(*counted, strict=True)]


def count_experts(worker: "WorkerBase") -> tuple[int, int, int]:
    """Experts that a worker's steps needed, those that had a slot, and the bytes of the
    others, in one wait for the device."""
    caches = [layer.cache for layer in cached_layers(worker.vllm_config)]
    counts = torch.stack([cache.counts for cache in caches]).tolist()
    hits = sum(found[1] for found in counts)
    misses = [found[2] for found in counts]
    sizes = (cache.expert_bytes for cache in caches)
    read = sum(count * size for count, size in zip(misses, sizes, strict=True))
    return hits + sum(misses), hits, read
