# SPDX-License-Identifier: Apache-2.0
"""What vLLM's NIXL connector sees of the platform: a device named `xpu`, in memory that
NIXL reads as the host's. On a device named `cpu` it makes no copies to the host."""

import importlib
from typing import Any

from vllm.platforms import current_platform

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
MODULES = ("base_scheduler", "base_worker", "scheduler", "worker")
"""Those that ask for the type of the device, in newer and in older releases."""


class SeenByNixl:
    """The platform, by the name of its device."""

    device_type = "xpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)

    @staticmethod
    def get_nixl_memory_type() -> str:
        return "DRAM"


def provide() -> None:
    """Let NIXL's modules see it, where the release has them."""
    for name in MODULES:
        try:
            module: Any = importlib.import_module(f"{NIXL}.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "current_platform"):
            module.current_platform = SeenByNixl()
