# SPDX-License-Identifier: Apache-2.0
"""Counts what a region of code costs the device: launches, memory and
synchronization."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Looked up by name: upstream forbids importing triton other than as tl and triton.
interpreter = importlib.import_module("triton.runtime.interpreter")
KernelInterface = importlib.import_module("triton.runtime.jit").KernelInterface


@dataclass
class Trace:
    """`launches` are names of Triton kernels, `ops` are operators that compute (neither
    views nor bare allocations nor vLLM's names for Python functions), `made` are
    operators that gave a new tensor, `waits` those that brought a value to the host.
    `largest` is how many bytes the largest new tensor has."""

    launches: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    largest: int = 0


def _storages(values: Any) -> set[int]:
    found: set[int] = set()
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, (list, tuple)):
            found |= _storages(value)
    return found


def _bytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.nbytes
    if isinstance(values, (list, tuple)):
        return max(map(_bytes, values), default=0)
    return 0


def summary(trace: Trace) -> str:
    """The figures of `docs/layers.md`, and what they count."""
    return (
        f"{len(trace.launches)} Triton launches: {', '.join(trace.launches)};"
        f" {len(trace.ops)} operators: {', '.join(trace.ops)}"
    )


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
        made = bool(_storages(result) - inputs)
        if made:
            self.trace.made.append(str(func))
            self.trace.largest = max(self.trace.largest, _bytes(result))
        computes = made or func._schema.is_mutable
        if computes and "empty" not in str(func) and func.namespace != "vllm":
            self.trace.ops.append(str(func))
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.trace.waits.append(str(func))
        return result


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Record into the `Trace` that this yields. What happens inside a kernel is not
    seen."""
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
def options_of_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[dict[str, Any]]]:
    """Record the keyword arguments of each launch instead of launching."""
    options: list[dict[str, Any]] = []

    def launcher(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: options.append(kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        yield options


WAITING = (
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique"),
    *("__bool__", "__int__", "__float__", "__index__", "__array__"),
)


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise wherever Python reads a tensor's value or copies it to the host. On a
    device each such read waits for all work before it. Reads inside an operator or an
    interpreted kernel are not counted: there the emulation stands for the device.
    """
    inside = 0

    class Inside(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal inside
            assert inside or "nonzero" not in str(func), f"waits for the device: {func}"
            if func.namespace == "vllm":  # a Python function under a name
                return func(*args, **(kwargs or {}))
            inside += 1
            try:
                return func(*args, **(kwargs or {}))
            finally:
                inside -= 1

    def forbidden(name: str, original: Any) -> Any:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert inside, f"waits for the device: Tensor.{name}"
            return original(tensor, *args, **kwargs)

        return method

    original_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("device", args[0] if args else None)
        asked = isinstance(target, str | torch.device) and torch.device(target)
        host = asked and asked.type == "cpu" and not kwargs.get("non_blocking")
        assert inside or not host, "waits for the device: Tensor.to('cpu')"
        return original_to(tensor, *args, **kwargs)

    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        inside += 1
        try:
            launch(self, *args, **kwargs)
        finally:
            inside -= 1

    with monkeypatch.context() as patch, Inside():
        for name in WAITING:
            method = forbidden(name, getattr(torch.Tensor, name))
            patch.setattr(torch.Tensor, name, method)
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        yield


@contextmanager
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list that gets, for each launch, how many bytes it stored more than once.

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
    """In each interpreted launch, run only the programs with the highest first index.
    This keeps a test of the last of many tokens fast. A device runs all programs.
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
