# SPDX-License-Identifier: Apache-2.0
"""The decisions of a platform that says XPU, on whatever device its tensors are."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

COMPUTE_UNITS = 64
"""Xe cores of one tile of a Data Center Max 1550."""


class XpuDecisions(CpuPlatform):
    """A platform whose `is_xpu()` is true, with the choices of vLLM's XPU platform.

    The class derives from vLLM's CPU platform, whose process groups run everywhere.
    A subclass says where tensors and memory are.
    """

    _enum = PlatformEnum.XPU
    device_name = "xpu"
    device_control_env_var = "ZE_AFFINITY_MASK"
    ray_device_key = "GPU"
    worker_class = ""
    """The worker that runs here, by its qualified name."""

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """The choice of vLLM's own XPU platform."""
        from vllm.platforms.xpu import XPUPlatform

        backend: str = XPUPlatform.get_attn_backend_cls(*args, **kwargs)
        return backend

    @classmethod
    def get_vit_attn_backend(cls, *args: Any, **kwargs: Any) -> Any:
        """The choice of vLLM's own XPU platform."""
        from vllm.platforms.xpu import XPUPlatform

        return XPUPlatform.get_vit_attn_backend(*args, **kwargs)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Apply the decisions of vLLM's own XPU platform, with a worker that runs here.

        CpuPlatform's decisions are left out: they raise the batched tokens to 2,048
        and turn chunked prefill off, which would change what is under test.
        """
        from vllm.platforms.xpu import XPUPlatform

        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = cls.worker_class
        XPUPlatform.check_and_update_config(vllm_config)
        cls.restore_memory_figures()

    @classmethod
    def restore_memory_figures(cls) -> None:
        """Undo what importing XPUPlatform does: it redirects memory queries to an op of
        the device."""
        raise NotImplementedError

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
    def get_device_communicator_cls(cls) -> str:
        """What XPU's own communicator does, over the process groups of a CPU."""
        return "standins.emulated_xpu.communicator.EmulatedXpuCommunicator"

    @classmethod
    def insert_blocks_to_device(cls, *args: Any, **kwargs: Any) -> None:
        """As vLLM's own XPU platform copies from the host's buffers."""
        from vllm.platforms.xpu import XPUPlatform

        XPUPlatform.insert_blocks_to_device(*args, **kwargs)

    @classmethod
    def swap_out_blocks_to_host(cls, *args: Any, **kwargs: Any) -> None:
        """As vLLM's own XPU platform copies to the host's buffers."""
        from vllm.platforms.xpu import XPUPlatform

        XPUPlatform.swap_out_blocks_to_host(*args, **kwargs)

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> None:
        """An XPU has no compute capability."""
        return None

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return COMPUTE_UNITS

    @classmethod
    def supports_fp8(cls) -> bool:
        return True

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to do: the platform's module imports the stand-ins."""
