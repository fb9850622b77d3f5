# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker of one rank, on the CPU, around the release's own XPU model runner."""

import importlib
import inspect
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.workspace import init_workspace_manager
from vllm.v1.worker.xpu_model_runner import XPUModelRunner, XPUModelRunnerV2

from standins.emulated_xpu import device_api
from standins.emulated_xpu.decisions import plugin

if plugin():
    # As vLLM lets the general plugins of a wheel do, of which a run here has none.
    importlib.import_module("vllm_xpu_dsv4").register_loader()


class EmulatedXpuWorker(Worker):
    """Does what XPUWorker does, without queries to the device.

    The base class loads the model, reserves the workspace in a profile run, allocates
    the paged caches and runs the steps.
    """

    def init_device(self) -> None:
        """Start one gloo rank, the workspace manager and the model runner that the
        release chose."""
        self.device = torch.device("cpu")
        devices = current_platform.device_count()
        if self.local_rank >= devices:
            raise RuntimeError(f"rank {self.local_rank} of a host with {devices} XPUs")
        device_api.use_device(self.local_rank)
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        device_api.provide_caches()
        # Up to v0.23.0 a budget of thinking pins whatever the platform says.
        device_api.provide_pinned_memory()
        self.init_snapshot = _NothingInUse()
        init_workspace_manager(self.device, 1, *self._workspace_lanes())
        if self.use_v2_model_runner:
            current_platform.provide_pinned_memory()
        runner = _RunnerV2 if self.use_v2_model_runner else _Runner
        self.model_runner = runner(self.vllm_config, self.device)

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        """The caches are made in the device's memory."""
        if tag == "kv_cache":
            return device_api.DeviceMemory()
        return super()._maybe_get_memory_pool_context(tag)

    def _workspace_lanes(self) -> tuple[int, ...]:
        """How many lanes the GPU's worker would make, where the release has lanes."""
        count = getattr(gpu_worker, "_num_workspace_lanes", None)
        return (count(self.vllm_config, self.use_v2_model_runner),) if count else ()

    def compile_or_warm_up_model(self) -> Any:
        """Skip the warm-up, which compiles and tunes for a device."""
        set_random_seed(self.model_config.seed)
        times = inspect.signature(super().compile_or_warm_up_model).return_annotation
        if times in (float, "float", inspect.Signature.empty):
            return 0.0
        from vllm.v1.worker.worker_base import CompilationTimes

        return CompilationTimes(language_model=0.0, encoder=0.0)

    def shutdown(self) -> None:
        """Destroy the process groups, so that another engine can follow."""
        super().shutdown()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class _NoSamplingInProfile:
    """Leaves random sampling out of a profile run: the interpreter cannot run its
    Triton kernel, and XPU's own op needs the generator of a device."""

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class _Runner(_NoSamplingInProfile, XPUModelRunner):
    """The release's first model runner."""


class _RunnerV2(_NoSamplingInProfile, XPUModelRunnerV2):
    """The release's second model runner, whose buffers host and device share."""


class _NothingInUse:
    """A memory snapshot for the one log line that prints it."""

    free_memory = 0
