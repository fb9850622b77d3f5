# SPDX-License-Identifier: Apache-2.0
"""The parts of torch's device API that vLLM's XPU path uses and a CPU lacks.

`GRANTS` lists them all, each with what a device has and who asks for it. Of
`torch.cuda` nothing is granted: its names raise, as in a torch that is built for XPU,
until vLLM's own model runner replaces them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from standins.emulated_xpu import host_memory


class Event:
    """Stands for `torch.Event`. The CPU runs in order, so every event has passed."""

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self.timed, self.recorded = enable_timing, False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two events that take the time."""
        if not (self.timed and end.timed):
            raise RuntimeError("both events must be made with enable_timing=True")
        if not (self.recorded and end.recorded):
            raise RuntimeError("both events must be recorded")
        return 0.0


class XpuEvent(Event):
    """Stands for `torch.xpu.Event`, which takes one argument."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__(enable_timing=enable_timing)


class Stream:
    """Stands for `torch.xpu.Stream`. Work is finished when its call returns."""

    device = torch.device("cpu")

    def __init__(self, device: Any = None, priority: int = 0) -> None:
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
        return event or XpuEvent()

    def query(self) -> bool:
        return True


_current = Stream()


def current_stream(device: Any = None) -> Stream:
    return _current


def use_stream(stream: Stream | None) -> Stream:
    return stream or _current


def set_stream(stream: Stream) -> None:
    pass


def is_current_stream_capturing() -> bool:
    return False


def bytes_in_use(device_index: Any = None, /) -> int:
    return 0


def no_statistics(device_index: Any = None, /) -> dict[str, Any]:
    return {}


def free_and_total(device_index: Any = None, /) -> tuple[int, int]:
    return 0, 0


_device_index = 0


def use_device(index: int) -> None:
    """Make `index` the process's device, as a worker does by its local rank."""
    global _device_index
    _device_index = index


def current_device_index() -> int:
    return _device_index


def nothing() -> None:
    pass


def forget_peaks(device_index: Any = None, /) -> None:
    pass


def synchronize(device: Any = None, /) -> None:
    pass


def pinned_copy(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    return tensor if host_memory.is_pinned(tensor) else host_memory.pin(tensor.clone())


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    pass


@dataclass(frozen=True)
class Grant:
    """A name of torch that the emulated XPU replaces, and why it may.

    Args:
        name: where it is, from `torch` on.
        device: what a torch built for XPU has there.
        reason: who asks for it on vLLM's XPU path, and what a CPU does instead.
        value: what stands in for it.

    Raises:
        ValueError: the name is one of `torch.cuda`, which no torch built for XPU
            provides, or the grant does not say why.
    """

    name: str
    device: str
    reason: str
    value: Any

    def __post_init__(self) -> None:
        if self.name.startswith("torch.cuda"):
            raise ValueError(
                f"{self.name} raises in a torch without CUDA: grant the name of"
                " torch.xpu by which vLLM's model runner replaces it"
            )
        if not (self.device.strip() and self.reason.strip()):
            raise ValueError(f"{self.name}: say what a device has, and who asks for it")

    def provide(self) -> None:
        owner: Any = torch
        *path, leaf = self.name.split(".")[1:]
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, leaf, self.value)


RUNNER = "vLLM's XPU model runner puts it in place of torch.cuda's; on a CPU it raises"
MEMORY = "workers ask while they load and profile; without an accelerator it raises"

GRANTS = (
    Grant(
        "torch.Event",
        "the event of its accelerator",
        "model runners make events for their copies; without an accelerator it raises",
        Event,
    ),
    Grant("torch.xpu.Event", "an event of the queue", RUNNER, XpuEvent),
    Grant("torch.xpu.Stream", "a queue", RUNNER, Stream),
    Grant("torch.xpu.current_stream", "the device's queue", RUNNER, current_stream),
    Grant("torch.xpu.stream", "a context of a queue", RUNNER, use_stream),
    Grant("torch.xpu.set_stream", "a change of the queue", RUNNER, set_stream),
    Grant(
        "torch.accelerator.current_device_index",
        "the index of the process's device",
        "DeepSeek-V4.1's Engram asks for its compute units; it raises",
        current_device_index,
    ),
    Grant(
        "torch.xpu.is_current_stream_capturing",
        "whether work is recorded into a graph, since there are graphs (torch 2.11)",
        "since v0.28.0 " + RUNNER,
        is_current_stream_capturing,
    ),
    Grant(
        "torch.Tensor.pin_memory",
        "a copy of the tensor in pinned memory of the host",
        "runners pin what they copy from; without an accelerator it raises",
        pinned_copy,
    ),
    Grant(
        "torch.Tensor.record_stream",
        "memory that is kept until a queue has used it",
        "runners free what another queue reads; on a CPU it raises",
        record_stream,
    ),
)
"""What every process is granted."""

MEMORY_FIGURES = (
    *(
        Grant(f"torch.accelerator.{name}", "bytes of the device", MEMORY, bytes_in_use)
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated")
    ),
    Grant("torch.accelerator.empty_cache", "its cache emptied", MEMORY, nothing),
    Grant(
        "torch.accelerator.empty_host_cache",
        "its cache of pinned memory emptied (not yet in torch 2.11)",
        "since v0.28.0, which pins 2.13, an engine does it at its end; it raises",
        nothing,
    ),
    Grant("torch.accelerator.synchronize", "a wait for it", MEMORY, synchronize),
    Grant(
        "torch.accelerator.reset_peak_memory_stats",
        "its peaks forgotten",
        MEMORY,
        forget_peaks,
    ),
    Grant("torch.accelerator.memory_stats", "figures by name", MEMORY, no_statistics),
    Grant(
        "torch.accelerator.get_memory_info",
        "free and total bytes",
        MEMORY,
        free_and_total,
    ),
)
"""Memory queries, for which there is no accelerator: nothing is in use. vLLM's XPU
platform replaces some when it is imported, so they may be provided again."""


def _pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return host_memory.pin(tensor) if pin_memory else tensor

    return made


PINNED_MEMORY = (
    *(
        Grant(
            f"torch.{name}",
            "a tensor in pinned memory of the host, if the caller asks",
            "the second model runner's buffers, and a budget of thinking up to v0.23.0;"
            " without an accelerator it raises",
            _pinning(getattr(torch, name)),
        )
        for name in (
            "empty",
            "empty_like",
            "empty_strided",
            "full",
            "ones",
            "tensor",
            "zeros",
            "zeros_like",
        )
    ),
    Grant(
        "torch.Tensor.is_pinned",
        "whether host memory is pinned",
        "the second model runner checks its buffers, which the device reads",
        host_memory.is_pinned,
    ),
)
"""Pinned memory: the emulated device reads the host's. For workers, not for tests of
kernels, where torch.compile would trace the factories."""


_device_memory: dict[int, torch.UntypedStorage] = {}
"""What stands for memory of the device, by its address. It stays alive: host memory at
the address of a cache that is gone would pass for the device's."""


class DeviceMemory(TorchFunctionMode):
    """What `torch.zeros` makes in this context lies on the device: it says `is_xpu`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # By its name: workers replace `torch.zeros` itself.
        if getattr(func, "__name__", "") == "zeros":
            storage = made.untyped_storage()
            # An empty tensor has no address.
            if storage.data_ptr():
                _device_memory[storage.data_ptr()] = storage
        return made


def lies_on_device(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _device_memory


CACHES = (
    Grant(
        "torch.Tensor.is_xpu",
        "whether a tensor lies on the device",
        "transfers tell caches from the host's copies by it; on a CPU none says so",
        property(lies_on_device),
    ),
)
"""For workers alone, whose caches are made in `DeviceMemory`."""


def remove_cuda() -> None:
    """Make a CUDA build of torch answer like an XPU or CPU build, which has no CUDA.

    vLLM's XPU path must fail in the same way, whichever build is installed.
    """
    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        return
    del torch._C._cuda_getDeviceCount
    torch._C._has_cuda = False
    torch.version.cuda = None
    dummy = torch._utils._dummy_type
    for name in ("CUDAGraph", "Event", "Stream"):
        setattr(torch.cuda, name, dummy(name))
    for name in ("_cuda_isCurrentStreamCapturing", "_graph_pool_handle"):
        setattr(torch.cuda.graphs, name, dummy(name))


def provide_memory_figures() -> None:
    for grant in MEMORY_FIGURES:
        grant.provide()


def provide_caches() -> None:
    for grant in CACHES:
        grant.provide()


def provide_pinned_memory() -> None:
    for grant in PINNED_MEMORY:
        grant.provide()
    host_memory.check_launches()


_libraries: list[torch.library.Library] = []
"""Kept, because torch removes an implementation together with its library."""


def provide_matmul_with_dtype() -> None:
    """Implement `torch.mm(..., out_dtype=)`, which torch has on devices only. An XPU's
    takes 16-bit factors for a product in float32, or gives their own dtype
    (pytorch/pytorch#170523)."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU"):
        return

    def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> Any:
        wider = out_dtype == torch.float32 and a.dtype in (
            torch.float16,
            torch.bfloat16,
        )
        if a.dtype != b.dtype or not (wider or out_dtype == a.dtype):
            raise RuntimeError(
                f"torch.mm of {a.dtype} and {b.dtype} gives {out_dtype} on no XPU"
            )
        return torch.mm(a.float(), b.float()).to(out_dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", matmul, "CPU")
    _libraries.append(library)


def provide() -> None:
    """Provide what every process is granted. vLLM imports the platform, which calls
    this, before any test runs."""
    remove_cuda()
    for grant in GRANTS:
        grant.provide()
    provide_memory_figures()
    provide_matmul_with_dtype()
