# SPDX-License-Identifier: Apache-2.0
"""A vLLM platform that says XPU and computes on an NVIDIA GPU."""

import torch

from standins.emulated_xpu.on_cuda import device_api, forms

device_api.provide()
forms.replace_stand_ins()

import vllm_xpu_kernels._C  # noqa: E402
import vllm_xpu_kernels._moe_C  # noqa: E402
import vllm_xpu_kernels._xpu_C  # noqa: E402, F401

from standins.emulated_xpu.decisions import XpuDecisions  # noqa: E402

# vLLM's own XPU platform has redirected memory queries to an op of the device.
device_api.restore_memory_figures()


class XpuPathOnCudaPlatform(XpuDecisions):
    """Tensors, memory, streams and graphs are the GPU's; NCCL stands for XCCL."""

    device_type = "cuda"
    dist_backend = "nccl"
    dispatch_key = "CUDA"
    worker_class = "standins.emulated_xpu.on_cuda.worker.XpuPathOnCudaWorker"

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
    def get_device_communicator_cls(cls) -> str:
        return "standins.emulated_xpu.on_cuda.communicator.XpuCommunicatorOnCuda"
