# SPDX-License-Identifier: Apache-2.0
"""For which arguments Triton compiles kernels, in a warm-up and for a request."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from . import layout

KernelInterface = importlib.import_module("triton.runtime.jit").KernelInterface
OURS = (
    "vllm.model_executor.kernels.xpu_dsv4.",
    "vllm.model_executor.kernels.attention.dsa.candidate_blocks",
)


def specialization(kernel: Any, values: dict[str, Any]) -> tuple[Any, ...]:
    """The properties for which Triton compiles a kernel again: constants and options,
    dtypes and alignment of tensors, and whether a number is 1 or a multiple of 16."""
    alike = kernel.kwargs.get("do_not_specialize") or ()
    anywhere = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    found = []
    for name, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            aligned = name not in anywhere and value.data_ptr() % 16 == 0
            found.append((name, value.dtype, aligned))
        elif name.islower() and name in kernel.arg_names and isinstance(value, int):
            kind = "any" if name in alike else 16 if value % 16 == 0 else value == 1
            found.append((name, kind, value >= 2**31))
        elif name.islower() and isinstance(value, float):
            found.append((name, float))
        else:
            found.append((name, value))
    return kernel.fn.__name__, *found


@contextmanager
def compiled(
    monkeypatch: pytest.MonkeyPatch, *, launch: bool = True
) -> Iterator[set[Any]]:
    """The specializations of our kernels that are launched, or would be."""
    found: set[Any] = set()
    original = KernelInterface.__getitem__

    def getitem(kernel: Any, grid: Any) -> Any:
        launcher = original(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            if kernel.fn.__module__.startswith(OURS):
                values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
                found.add(specialization(kernel, values))
            return launcher(*args, **kwargs) if launch else None

        return run

    with monkeypatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", getitem)
        yield found


def warmed_up(registry: Any, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What the registry's warm-up compiles of our kernels."""
    triton_helper = layout.module("vllm.model_executor.warmup.jit_warmup_triton_helper")
    # Kernels that are compiled without a launch: the interpreter cannot.
    monkeypatch.setattr(
        triton_helper.VllmTritonJitKernel, "compile_many", lambda *args: None
    )
    with compiled(monkeypatch, launch=False) as found:
        registry.warmup()
    return found


def check(needed: set[Any], before: set[Any]) -> None:
    assert needed
    missing = {name for name, *_ in needed - before}
    assert not missing, f"a request compiles {sorted(missing)}"
