# SPDX-License-Identifier: Apache-2.0
"""The release's own communicator of XPU, over gloo where a device has XCCL."""

from vllm.distributed.device_communicators import (
    base_device_communicator,
    xpu_communicator,
)
from vllm.distributed.device_communicators.xpu_communicator import XpuCommunicator

from standins.emulated_xpu import collectives

collectives.provide()
for module in (base_device_communicator, xpu_communicator):
    module.dist = collectives.Collectives()


class EmulatedXpuCommunicator(XpuCommunicator):
    """XPU's own, with no other method; its name makes vLLM import this module."""
