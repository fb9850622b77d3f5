# SPDX-License-Identifier: Apache-2.0
"""The parts of torch's device API that vLLM's XPU path uses and a CPU lacks."""

import functools
from collections.abc import Callable
from typing import Any

import torch


class Event:
    """Stands for `torch.xpu.Event`. The CPU runs in order, so every event has
    passed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    """Stands for `torch.xpu.Stream`. Work is finished when its call returns."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True


def remove_cuda() -> None:
    """Make a CUDA build of torch answer like an XPU or CPU build, which has no CUDA.

    vLLM's XPU path must fail in the same way, whichever build is installed.
    """
    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        return
    del torch._C._cuda_getDeviceCount
    torch._C._has_cuda = False
    torch.version.cuda = None
    for name in ("CUDAGraph", "Event", "Stream"):
        setattr(torch.cuda, name, torch._utils._dummy_type(name))


def provide_events() -> None:
    """Replace `torch.xpu.Event`, which raises in a torch without XPU."""
    torch.xpu.Event = Event


def provide_streams() -> None:
    """Provide one stream, and the generator of the device's random numbers."""
    current = Stream()
    torch.xpu.Stream = Stream
    torch.xpu.current_stream = lambda device=None: current
    torch.xpu.stream = lambda stream: stream or current
    torch.xpu.set_stream = lambda stream: None
    torch.xpu.synchronize = lambda device=None: None
    torch.xpu.mem_get_info = lambda device=None: (0, 0)
    torch.xpu.default_generators = (torch.default_generator,)
    torch.Event = Event


def provide_memory_figures() -> None:
    """Answer memory queries, for which there is no accelerator: nothing is in use."""
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(torch.accelerator, name, lambda *args, **kwargs: 0)
    for name in (
        "empty_cache",
        "empty_host_cache",
        "reset_peak_memory_stats",
        "synchronize",
    ):
        setattr(torch.accelerator, name, lambda *args, **kwargs: None)
    torch.accelerator.memory_stats = lambda device=None: {}
    torch.accelerator.get_memory_info = lambda device=None: (0, 0)


def provide_capture_state() -> None:
    """Answer that no stream is being captured into a graph."""
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.xpu.is_current_stream_capturing = lambda: False


def provide_pinning() -> None:
    """Leave host memory unpinned: pinning needs an accelerator."""

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        return tensor

    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.record_stream = lambda tensor, stream: None


FACTORIES = ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


def provide_pinned_memory() -> None:
    """Accept `pin_memory=True`, and call all memory pinned: the emulated device reads
    the host's memory.

    Not for tests of kernels, where torch.compile would trace the factories.
    """

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return make(*args, **kwargs)

        return made

    for name in FACTORIES:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.is_pinned = lambda tensor, device=None: True


_libraries: list[torch.library.Library] = []
"""Kept, because torch removes an implementation together with its library."""


def provide_matmul_with_dtype() -> None:
    """Implement `torch.mm(..., out_dtype=)`, which torch has on devices only."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU"):
        return

    def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> Any:
        return torch.mm(a.float(), b.float()).to(out_dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", matmul, "CPU")
    _libraries.append(library)


def provide() -> None:
    """Provide all of the above. vLLM imports the platform, which calls this, before any
    test runs."""
    remove_cuda()
    provide_events()
    provide_streams()
    provide_memory_figures()
    provide_capture_state()
    provide_pinning()
    provide_matmul_with_dtype()
