# SPDX-License-Identifier: Apache-2.0
"""A vLLM platform that says XPU and computes on the CPU."""

import os
from typing import Any

import torch
import vllm_xpu_kernels._C
import vllm_xpu_kernels._moe_C
import vllm_xpu_kernels._xpu_C  # noqa: F401
from vllm.utils import platform_utils

from standins.emulated_xpu import architectures, device_api
from standins.emulated_xpu.decisions import XpuDecisions

MEMORY = 64 << 30
"""Bytes of device memory of one tile of a Data Center Max 1550."""
DEVICES = 16
"""Devices of a host, of which `ZE_AFFINITY_MASK` shows some."""

# After vLLM's own XPU platform, which redirects memory queries to an op of the device.
device_api.provide()


class EmulatedXpuPlatform(XpuDecisions):
    """Tensors, process groups and memory are the CPU's."""

    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    worker_class = "standins.emulated_xpu.worker.EmulatedXpuWorker"
    pins_memory = False

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return getattr(torch.xpu, key, None)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return cls.pins_memory

    @classmethod
    def provide_pinned_memory(cls) -> None:
        """Answer that host memory can be pinned, and let torch pin it."""
        if cls.pins_memory:
            return
        device_api.provide_pinned_memory()
        cls.pins_memory = True
        # vLLM may have asked before, and remembers the answers.
        platform_utils.is_pin_memory_available.cache_clear()
        platform_utils.is_uva_available.cache_clear()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Nothing to do."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return f"Intel(R) Graphics [{architectures.chip()}]"

    @classmethod
    def device_count(cls) -> int:
        mask = os.environ.get(cls.device_control_env_var, "")
        return len(mask.split(",")) if mask else DEVICES

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return MEMORY

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return 0.0

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return False

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        return []
