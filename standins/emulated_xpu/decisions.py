# SPDX-License-Identifier: Apache-2.0
"""The decisions of a platform that says XPU, on whatever device its tensors are.

vLLM takes one platform plugin. Where the wheel has this stack's, which refuses what an
XPU cannot serve, the emulation derives from its class.
"""

import importlib.util
from typing import Any

from vllm.platforms.xpu import XPUPlatform

COMPUTE_UNITS = 64
"""Xe cores of one tile of a Data Center Max 1550."""


def plugin() -> bool:
    """Whether the wheel has a plugin that is not switched off."""
    if importlib.util.find_spec("vllm_xpu_dsv4") is None:
        return False
    import vllm_xpu_dsv4

    return bool(vllm_xpu_dsv4.is_on())


def wheels_platform() -> Any:
    """The platform that an XPU's server takes: the plugin's, else the release's."""
    if not plugin():
        return XPUPlatform
    from vllm_xpu_dsv4.platform import DeepSeekV4XPUPlatform

    return DeepSeekV4XPUPlatform


class XpuDecisions(wheels_platform()):  # type: ignore[misc]
    """The release's own XPU platform, but for what it would ask a device.

    `OWN_ANSWERS` lists what this class and those below it answer themselves, and why.
    A subclass says where tensors and memory are.
    """

    worker_class = ""
    """The worker that runs here, by its qualified name."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = cls.worker_class
        super().check_and_update_config(vllm_config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """What XPU's own communicator does, over the process groups of a CPU."""
        return "standins.emulated_xpu.communicator.EmulatedXpuCommunicator"

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return COMPUTE_UNITS


OWN_ANSWERS = {
    "__getattr__": "finds streams and the like in torch.xpu, whatever `device_type` is",
    "check_and_update_config": "names a worker that runs here, then asks the release",
    "device_count": "the emulated host's, as its mask shows them",
    "device_type": "torch's tensors lie on the CPU",
    "discover_numa_topology": "NIXL asks where `device_type` is cpu: no core set aside",
    "dispatch_key": "vLLM registers its ops for the tensors' device",
    "dist_backend": "gloo stands for XCCL, with XCCL's refusals",
    "get_current_memory_usage": "there is no device memory to use",
    "get_device_communicator_cls": "the release's own communicator, over gloo",
    "get_device_name": "the chip's: no driver gives the name of a card",
    "get_device_total_memory": "the emulated device's",
    "is_pin_memory_available": "as on an XPU, once a worker has provided it",
    "num_compute_units": "the emulated device's",
    "set_device": "the CPU is the device of every rank",
    "support_static_graph_mode": "a CPU records no graph",
}
"""What the emulation answers in place of the release's platforms, and why."""
