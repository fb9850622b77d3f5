# SPDX-License-Identifier: Apache-2.0
"""What attention compiles for a request, the JIT warm-up has compiled."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import layout, model_layers
from helpers.attention_batch import Batch, random_sinks

KernelInterface = importlib.import_module("triton.runtime.jit").KernelInterface
OURS = "vllm.model_executor.kernels.xpu_dsv4."


def specialization(kernel: Any, values: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel anew for: constants and options, dtypes and
    alignment of tensors, and whether a number is 1 or a multiple of 16."""
    alike = kernel.kwargs.get("do_not_specialize") or ()
    found = []
    for name, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            found.append((name, value.dtype, value.data_ptr() % 16 == 0))
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


@pytest.mark.parametrize(
    ("ratio", "seq_lens", "query_lens"),
    [
        (0, (5,) * 9, (1,) * 9),
        (0, (260, 9, 7), (1, 1, 4)),
        (4, (131, 600), (1, 3)),
        (128, (259, 140), (1, 2)),
    ],
    ids=["window decode", "window", "ratio 4", "ratio 128"],
)
def test_a_request_compiles_nothing(
    ratio: int,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmup = layout.module("vllm.model_executor.warmup.jit_warmup")
    triton_helper = layout.module("vllm.model_executor.warmup.jit_warmup_triton_helper")
    registries = []

    def build(config: Any, ratio: int) -> Any:
        registries.append(warmup.JitWarmupRegistry(config))
        with registries[0].activate():
            return model_layers.attention_layer(config, ratio)

    batch = Batch(ratio, seq_lens, query_lens, sinks=random_sinks(), build=build)
    # Kernels that are compiled without a launch: the interpreter cannot.
    monkeypatch.setattr(
        triton_helper.VllmTritonJitKernel, "compile_many", lambda *args: None
    )
    with compiled(monkeypatch, launch=False) as before:
        registries[0].warmup()
    with batch.ready() as run, compiled(monkeypatch) as needed:
        run()
    assert needed
    missing = {name for name, *_ in needed - before}
    assert not missing, f"a request compiles {sorted(missing)}"
