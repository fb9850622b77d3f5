# SPDX-License-Identifier: Apache-2.0
"""What vLLM's NIXL connector sees of the platform: a device named `xpu`, in memory that
NIXL reads as the host's. On a device named `cpu` it makes no copies to the host."""

import functools
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
    """Let NIXL's modules see it before a connector is made: vLLM's plugin of every
    process, because scheduler and workers need not share one."""
    module = "vllm.distributed.kv_transfer.kv_connector.factory"
    factory: Any = importlib.import_module(module).KVConnectorFactory
    create = factory.create_connector

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        _show()
        return create(*args, **kwargs)

    factory.create_connector = created


def _show() -> None:
    for name in MODULES:
        try:
            module: Any = importlib.import_module(f"{NIXL}.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "current_platform"):
            module.current_platform = SeenByNixl()
