# SPDX-License-Identifier: Apache-2.0
"""Names what each decoder layer launches, one step after the other.

Lives inside an installed vLLM, beside `recording.py`. An interpreted Triton kernel, an
op of vllm-xpu-kernels and an operator of torch that computes count as one launch each;
what they do inside is not seen. An op of vLLM counts as what it calls.
"""

import re
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter as triton_interpreter

from standins.emulated_xpu import registry

ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")

found: list[tuple[int, int, list[str]]] = []
"""Of each call of a layer: its number, the tokens, and what it launched."""
_open: list[list[str]] = []
"""The launches of the layer that runs, if one does."""


class _Calls(type(registry.calls)):  # type: ignore[misc]
    """Counts the ops' calls as `registry` does, and notes them."""

    def __setitem__(self, name: str, count: int) -> None:
        note(name)
        super().__setitem__(name, count)


class _Watch(TorchDispatchMode):
    """Notes operators of torch, but for those inside a kernel or an op."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        ours = func.namespace in registry.namespaces()
        self.inside += ours
        try:
            if func.namespace == "vllm":
                # An op made of others: those are launched.
                with self:
                    result = func.redispatch(ON_CPU, *args, **(kwargs or {}))
            else:
                result = func(*args, **(kwargs or {}))
        finally:
            self.inside -= ours
        if not ours and not self.inside and self._computes(func, args, result):
            note(str(func))
        return result

    def _computes(self, func: Any, args: Any, result: Any) -> bool:
        if func.namespace == "vllm" or "empty" in str(func):
            return False
        return bool(func._schema.is_mutable or storages(result) - storages(args))


def storages(values: Any) -> set[int]:
    """The memory of the tensors in `values`."""
    if isinstance(values, torch.Tensor):
        return {values.untyped_storage().data_ptr()}
    if isinstance(values, list | tuple):
        return set().union(*map(storages, values))
    return set()


def note(name: str) -> None:
    if _open:
        _open[-1].append(name)


def watch(model: torch.nn.Module) -> None:
    """Note from now on what the layers of `model` launch."""
    watching = _Watch()
    registry.calls = _Calls(registry.calls)
    run = triton_interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not watching.inside:
            note(self.fn.__name__)
        watching.inside += 1
        try:
            return run(self, *args, **kwargs)
        finally:
            watching.inside -= 1

    triton_interpreter.GridExecutor.__call__ = noted
    for name, layer in model.named_modules():
        if number := LAYER.search(name):
            _watch_layer(int(number[1]), layer, watching)


def _watch_layer(number: int, layer: torch.nn.Module, watching: _Watch) -> None:
    forward = layer.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if torch.is_tensor(v)]
        _open.append([])
        with watching:
            result = forward(*args, **kwargs)
        found.append((number, len(tensors[0]), _open.pop()))
        return result

    layer.forward = watched
