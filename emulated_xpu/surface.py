# SPDX-License-Identifier: Apache-2.0
"""The parts of torch's device surface that vLLM's XPU path uses and a CPU lacks."""

from typing import Any

import torch


class Event:
    """Stands for `torch.xpu.Event`: the CPU runs in order, so waiting is done."""

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


def provide_events() -> None:
    """`torch.xpu.Event` of a torch without XPU raises when constructed."""
    torch.xpu.Event = Event


def provide_memory_figures() -> None:
    """No accelerator answers memory questions: nothing is in use."""
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(torch.accelerator, name, lambda *args, **kwargs: 0)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        setattr(torch.accelerator, name, lambda *args, **kwargs: None)


def provide_capture_state() -> None:
    """A torch without CUDA has no stream to ask whether it is being captured."""
    torch.cuda.is_current_stream_capturing = lambda: False


def provide_pinning() -> None:
    """Host memory is pinned for an accelerator, and there is none."""

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        return tensor

    torch.Tensor.pin_memory = pin_memory


def provide() -> None:
    """Provide all of it. Called when the platform is chosen, before any test runs."""
    provide_events()
    provide_memory_figures()
    provide_capture_state()
    provide_pinning()
