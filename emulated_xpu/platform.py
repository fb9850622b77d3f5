# SPDX-License-Identifier: Apache-2.0
"""A vLLM platform that says XPU and computes on the CPU."""

from typing import Any

import vllm_xpu_kernels._C
import vllm_xpu_kernels._moe_C
import vllm_xpu_kernels._xpu_C  # noqa: F401
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum
from vllm.utils import platform_utils

from emulated_xpu import device_api

COMPUTE_UNITS = 64
"""Xe cores of one tile of a Data Center Max 1550."""
MEMORY = 64 << 30
"""Bytes of device memory of one such tile."""

device_api.provide()


class EmulatedXpuPlatform(CpuPlatform):
    """`is_xpu()` is true, and tensors live on the CPU.

    The class derives from vLLM's CPU platform, because tensors, process groups and
    memory are the CPU's. Where an XPU answers differently, it answers as vLLM's
    XPUPlatform.
    """

    _enum = PlatformEnum.XPU
    device_name = "xpu"
    device_type = "cpu"
    pins_memory = False

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """The choice of vLLM's own XPU platform."""
        from vllm.platforms.xpu import XPUPlatform

        backend: str = XPUPlatform.get_attn_backend_cls(*args, **kwargs)
        return backend

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Apply the decisions of vLLM's own XPU platform, with a worker that runs here.

        CpuPlatform's decisions are left out: they raise the batched tokens to 2,048
        and turn chunked prefill off, which would change what is under test.
        """
        from vllm.platforms.xpu import XPUPlatform

        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "emulated_xpu.worker.EmulatedXpuWorker"
        XPUPlatform.check_and_update_config(vllm_config)
        # Importing XPUPlatform redirects memory queries to an op of the device.
        device_api.provide_memory_figures()

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """The choice of vLLM's own XPU platform."""
        from vllm.platforms.xpu import XPUPlatform

        XPUPlatform.update_block_size_for_backend(vllm_config)

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:
        """The choice of vLLM's own XPU platform: its fused ops first."""
        from vllm.platforms.xpu import XPUPlatform

        return XPUPlatform.get_default_ir_op_priority(vllm_config)

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """As on an XPU, once a worker has provided it."""
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
    def get_device_capability(cls, device_id: int = 0) -> None:
        """An XPU has no compute capability."""
        return None

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return MEMORY

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Always zero: there is no device memory to use."""
        return 0.0

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return COMPUTE_UNITS

    @classmethod
    def supports_fp8(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return False

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to do: this module imports the stand-ins."""
