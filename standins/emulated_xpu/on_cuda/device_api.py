# SPDX-License-Identifier: Apache-2.0
"""`torch.xpu` on a machine with an NVIDIA GPU: its names mean those of `torch.cuda`.

All of them are names of `torch.xpu` that a device has. Those of `torch.cuda` answer
here as well. On an XPU they raise until a runner replaces them, as the emulation on a
CPU shows.
"""

from collections.abc import Callable
from typing import Any

import torch


class Event(torch.cuda.Event):
    """Stands for `torch.xpu.Event`, which takes one argument."""

    def __new__(cls, enable_timing: bool = False) -> "Event":
        event: Event = super().__new__(cls, enable_timing=enable_timing)
        return event


TWINS = {
    "Stream": "Stream",
    "XPUGraph": "CUDAGraph",
    "current_device": "current_device",
    "current_stream": "current_stream",
    "default_generators": "default_generators",
    "empty_cache": "empty_cache",
    "graph": "graph",
    "graph_pool_handle": "graph_pool_handle",
    "is_current_stream_capturing": "is_current_stream_capturing",
    "manual_seed_all": "manual_seed_all",
    "max_memory_allocated": "max_memory_allocated",
    "mem_get_info": "mem_get_info",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "set_device": "set_device",
    "set_stream": "set_stream",
    "stream": "stream",
    "synchronize": "synchronize",
}
"""Names of `torch.xpu`, and what has their meaning in `torch.cuda`.

`is_available`, and `device_count`, which it calls, are not among them: there is no
Intel device whose properties kernels could read."""

_memory_figures: dict[str, Callable[..., Any]] = {}


def provide() -> None:
    """Bind the names. vLLM's XPU runner binds those of `torch.cuda` to them in turn, so
    each must be bound before it runs."""
    torch.cuda.init()
    for name, twin in TWINS.items():
        setattr(torch.xpu, name, getattr(torch.cuda, twin))
    torch.xpu.Event = Event
    _memory_figures["get_memory_info"] = torch.accelerator.get_memory_info


def restore_memory_figures() -> None:
    """Let the accelerator answer memory queries itself again."""
    for name, function in _memory_figures.items():
        setattr(torch.accelerator, name, function)


_TYPES = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}
"""The integer type of each element size, as which memory is passed on."""


class _HostMemory:
    """Pinned memory of the host, as CUDA's array interface describes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.owner = tensor
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": _TYPES[size],
            "version": 3,
        }


def device_view(pinned: torch.Tensor) -> torch.Tensor:
    """The device's view of pinned host memory, with `pinned`'s shape and strides.

    Under unified addressing both have one address. The view keeps the memory alive.

    Raises:
        ValueError: the memory is not pinned.
    """
    if not pinned.is_pinned():
        raise ValueError("get_xpu_view_from_cpu_tensor: the memory is not pinned")
    view = torch.as_tensor(_HostMemory(pinned), device="cuda")
    return view.view(pinned.dtype)
