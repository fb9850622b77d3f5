# SPDX-License-Identifier: Apache-2.0
"""Ops of the pinned vllm-xpu-kernels: which there are, and which are called."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.platforms import current_platform


def has(name: str) -> bool:
    """Whether the release's pin has the op."""
    assert current_platform, "which imports the ops of the pin"
    return hasattr(torch.ops._xpu_C, name)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[str]]:
    """Yield the list that gets the name of each op of `names` when it is called."""
    calls: list[str] = []

    def record(name: str) -> Any:
        op = getattr(torch.ops._xpu_C, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return op(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in names:
            if hasattr(torch.ops._xpu_C, name):
                patch.setattr(torch.ops._xpu_C, name, record(name))
        yield calls


def layouts(op: Any, *args: Any) -> tuple[list[Any], list[Any]]:
    """Types, shapes and strides of what `op` gives: (for tensors, for fake ones), which
    a compiled graph relies on to be the same."""
    mode = FakeTensorMode()
    fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    with mode:
        promised = op(*fake)
    given = op(*args)
    as_list = [
        list(values) if isinstance(values, (tuple, list)) else [values]
        for values in (given, promised)
    ]
    given, promised = (
        [(t.dtype, t.shape, t.stride()) for t in values] for values in as_list
    )
    return given, promised
