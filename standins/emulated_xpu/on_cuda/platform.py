# SPDX-License-Identifier: Apache-2.0
"""A vLLM platform that says XPU and computes on an NVIDIA GPU."""

from typing import Any

import torch

from standins.emulated_xpu.on_cuda import device_api, forms

forms.replace_stand_ins()

import vllm_xpu_kernels._C  # noqa: E402
import vllm_xpu_kernels._moe_C  # noqa: E402
import vllm_xpu_kernels._xpu_C  # noqa: E402, F401

from standins.emulated_xpu.decisions import XpuDecisions  # noqa: E402

device_api.provide()


class XpuPathOnCudaPlatform(XpuDecisions):
    """Tensors, memory, streams and graphs are the GPU's; NCCL stands for XCCL."""

    device_type = "cuda"
    dist_backend = "nccl"
    dispatch_key = "CUDA"
    worker_class = "standins.emulated_xpu.on_cuda.worker.XpuPathOnCudaWorker"

    @classmethod
    def restore_memory_figures(cls) -> None:
        device_api.restore_memory_figures()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return str(torch.cuda.get_device_name(device_id))

    @classmethod
    def device_count(cls) -> int:
        return int(torch.cuda.device_count())

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(torch.cuda.get_device_properties(device_id).total_memory)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return float(torch.cuda.max_memory_allocated(device))

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "standins.emulated_xpu.on_cuda.communicator.XpuCommunicatorOnCuda"

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """The choice of vLLM's own XPU platform."""
        from vllm.platforms.xpu import XPUPlatform

        wrapper: str = XPUPlatform.get_static_graph_wrapper_cls()
        return wrapper

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True
