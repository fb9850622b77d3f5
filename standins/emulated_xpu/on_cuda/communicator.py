# SPDX-License-Identifier: Apache-2.0
"""The release's own communicator of XPU, over NCCL where a device has XCCL."""

from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators import xpu_communicator
from vllm.distributed.device_communicators.xpu_communicator import XpuCommunicator

SINGLE = "all_gather_single"
"""Since torch 2.13 the name of `all_gather_into_tensor`."""


class Collectives:
    """`torch.distributed` of an older torch, by the names of the release's own."""

    def __getattr__(self, name: str) -> Any:
        if name == SINGLE and not hasattr(torch.distributed, SINGLE):
            name = "all_gather_into_tensor"
        return getattr(torch.distributed, name)


xpu_communicator.dist = Collectives()


class XpuCommunicatorOnCuda(XpuCommunicator):
    """XPU's own, whose device is the GPU of that number."""

    def __init__(
        self, cpu_group: Any, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(cpu_group, torch.device("cuda", device.index), *args, **kwargs)
