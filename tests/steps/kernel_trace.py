# SPDX-License-Identifier: Apache-2.0
"""What a region of code asks of the device: launches, memory and waiting."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.jit import KernelInterface


@dataclass
class Trace:
    """`launches` are names of Triton kernels, `made` are operators that gave a new
    tensor, `waits` are operators that brought a value to the host."""

    launches: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


def _storages(values: Any) -> set[int]:
    found: set[int] = set()
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, (list, tuple)):
            found |= _storages(value)
    return found


class _Watch(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace, self.paused = trace, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        inputs = _storages([*args, *(kwargs or {}).values()])
        if _storages(result) - inputs:
            self.trace.made.append(str(func))
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.trace.waits.append(str(func))
        return result


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Record into the `Trace` that this yields; a kernel's own doing is not seen."""
    trace = Trace()
    watch = _Watch(trace)
    original = KernelInterface.__getitem__

    def launcher(kernel: Any, grid: Any) -> Any:
        launch = original(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            trace.launches.append(kernel.fn.__name__)
            watch.paused = True
            try:
                return launch(*args, **kwargs)
            finally:
                watch.paused = False

        return run

    with monkeypatch.context() as patch, watch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        yield trace


@contextmanager
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list that gets, for each launch, how many bytes it stored again.

    Only an interpreted kernel can be watched; on a device the list stays empty.
    """
    again: list[int] = []
    seen: list[np.ndarray] = []
    store = interpreter.InterpreterBuilder.create_masked_store
    launch = interpreter.GridExecutor.__call__

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        width = np.arange(value.data.dtype.itemsize, dtype=np.uint64)
        first = ptrs.data[mask.data].astype(np.uint64)
        seen.append((first[:, None] + width).ravel())
        return store(self, ptrs, value, mask, *rest)

    def watched_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.clear()
        launch(self, *args, **kwargs)
        addresses = np.concatenate(seen) if seen else np.empty(0)
        again.append(len(addresses) - len(np.unique(addresses)))

    with monkeypatch.context() as patch:
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(interpreter.GridExecutor, "__call__", watched_launch)
        yield again


@contextmanager
def last_row_of_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run of each interpreted launch only the programs with the last first index.

    It makes a launch over many tokens affordable whose last token is of interest. A
    device runs them all.
    """
    launch = interpreter.GridExecutor.__call__
    builder = interpreter.interpreter_builder
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx

    def last_only(self: Any, *args: Any, **kwargs: Any) -> None:
        skipped = self.grid[0] - 1
        self.grid = (1, *self.grid[1:])
        with monkeypatch.context() as patch:
            patch.setattr(
                builder, "set_grid_dim", lambda x, y, z: set_dim(x + skipped, y, z)
            )
            patch.setattr(
                builder, "set_grid_idx", lambda x, y, z: set_index(x + skipped, y, z)
            )
            launch(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", last_only)
        yield
