# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker of one rank on an NVIDIA GPU, around the release's XPU runner."""

from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.workspace import init_workspace_manager
from vllm.v1.worker.xpu_model_runner import XPUModelRunner, XPUModelRunnerV2

from standins.emulated_xpu.decisions import plugin


def workers_checks() -> tuple[type, ...]:
    """What the wheel's plugin, if it is on, puts before the class of a worker."""
    if not plugin():
        return ()
    import vllm_xpu_dsv4
    from vllm_xpu_dsv4.releases import COMPARES_GRAPHS

    # As vLLM lets the general plugins of a wheel do, of which a run here has none.
    vllm_xpu_dsv4.register_loader()

    if not COMPARES_GRAPHS:
        return ()
    from vllm_xpu_dsv4.worker import ChecksGraphs

    return (ChecksGraphs,)


class XpuPathOnCudaWorker(*workers_checks(), Worker):  # type: ignore[misc]
    """Does what the worker of an XPU does, on the GPU of the rank's number.

    The base class profiles, allocates the paged caches, captures graphs and runs the
    steps.
    """

    def init_device(self) -> None:
        """Start one rank, the workspace manager and the model runner that the release
        chose."""
        self.device = torch.device("cuda", self.local_rank)
        current_platform.set_device(self.device)
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        if self.parallel_config.world_size > 1:
            torch.distributed.all_reduce(torch.zeros(1, device=self.device))
        set_random_seed(self.model_config.seed)
        free, total = torch.cuda.mem_get_info()
        self.init_snapshot = _Snapshot(free, total)
        self.requested_memory = total * self.cache_config.gpu_memory_utilization
        count = getattr(gpu_worker, "_num_workspace_lanes", None)
        lanes = (count(self.vllm_config, self.use_v2_model_runner),) if count else ()
        init_workspace_manager(self.device, 1, *lanes)
        runner = _RunnerV2 if self.use_v2_model_runner else _Runner
        self.model_runner = runner(self.vllm_config, self.device)

    def shutdown(self) -> None:
        """Destroy the process groups, so that another engine can follow."""
        super().shutdown()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class _Snapshot:
    """Memory before the model is loaded, in bytes."""

    def __init__(self, free: int, total: int) -> None:
        self.free_memory, self.total_memory = free, total


class _NoSamplingInProfile:
    """Leaves random sampling out of a profile run: XPU's op for it has no stand-in."""

    def _dummy_sampler_run(self, hidden_states: Any) -> Any:
        return hidden_states


class _Runner(_NoSamplingInProfile, XPUModelRunner):
    """The release's first model runner."""


class _RunnerV2(_NoSamplingInProfile, XPUModelRunnerV2):
    """The release's second model runner, whose buffers host and device share."""
