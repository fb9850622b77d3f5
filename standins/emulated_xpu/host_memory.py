# SPDX-License-Identifier: Apache-2.0
"""Which memory of the host is pinned, so that the device may read it.

Device and host share the memory of the emulation, so a copy to the device may be the
host's tensor itself. What a launch reads of the host is therefore known by the names of
its arguments alone: those that begin with `host_`.
"""

from typing import Any

import torch

PREFIX = "host_"


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, whose memory is pinned from now on."""
    # An attribute of a storage lives as long as its memory.
    storage: Any = tensor.untyped_storage()
    storage.is_pinned_host = True
    return tensor


def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    """Whether the memory of `tensor` was pinned."""
    return bool(getattr(tensor.untyped_storage(), "is_pinned_host", False))


def check_launches() -> None:
    """Let a launch of a Triton kernel raise ValueError whose `host_` arguments are
    pageable; a second call does nothing."""
    # Whoever launches has chosen the interpreter by now.
    from triton.runtime import interpreter

    run: Any = interpreter.GridExecutor.__call__
    if getattr(run, "checks_memory", False):
        return

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in {
            **dict(zip(self.arg_names, args, strict=False)),
            **kwargs,
        }.items():
            if name.startswith(PREFIX) and not is_pinned(value):
                raise ValueError(
                    f"{self.fn.__name__}: {name}, {list(value.shape)}, lies in "
                    "pageable memory of the host, which the device cannot read: pin it"
                )
        return run(self, *args, **kwargs)

    launch: Any = checked
    launch.checks_memory = True
    interpreter.GridExecutor.__call__ = launch
