# SPDX-License-Identifier: Apache-2.0
"""The JIT warm-up compiles every kernel that attention needs for a request."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import indexer_batch, layout, model_layers
from helpers.attention_batch import Batch, random_sinks

KernelInterface = importlib.import_module("triton.runtime.jit").KernelInterface
OURS = "vllm.model_executor.kernels.xpu_dsv4."


def specialization(kernel: Any, values: dict[str, Any]) -> tuple[Any, ...]:
    """The properties for which Triton compiles a kernel again: constants and options,
    dtypes and alignment of tensors, and whether a number is 1 or a multiple of 16."""
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


def registered(registries: list[Any]) -> Callable[[Any, int], Any]:
    """A function that builds an attention layer in a registry, which `registries`
    gets."""
    warmup = layout.module("vllm.model_executor.warmup.jit_warmup")

    def build(config: Any, ratio: int) -> Any:
        registries.append(warmup.JitWarmupRegistry(config))
        with registries[-1].activate():
            return model_layers.attention_layer(config, ratio)

    return build


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


def give_pages(layer: Any) -> None:
    """Empty pages for the attention of a ratio-4 layer, which the warm-up measures."""
    for cache, tokens in ((layer, 64), (layer.swa_cache_layer, 64)):
        cache.kv_cache = torch.zeros(
            (2, tokens, 584), dtype=torch.uint8, device=layout.device()
        )


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
    registries: list[Any] = []
    batch = Batch(
        ratio, seq_lens, query_lens, sinks=random_sinks(), build=registered(registries)
    )
    before = warmed_up(registries[0], monkeypatch)
    with batch.ready() as run, compiled(monkeypatch) as needed:
        run()
    check(needed, before)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [((300,), (1,)), ((300, 70, 9), (1, 1, 5)), ((90, 40), (6, 5))],
    ids=["decode", "mixed", "prefill"],
)
def test_an_mxfp4_indexer_compiles_nothing(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registries: list[Any] = []
    batch = indexer_batch.Batch(
        seq_lens, query_lens, fp4=True, build=registered(registries)
    )
    give_pages(batch.layer)
    before = warmed_up(registries[0], monkeypatch)
    with compiled(monkeypatch) as needed:
        batch.run()
    check({found for found in needed if "logits" in found[0]}, before)
