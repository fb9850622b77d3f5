# SPDX-License-Identifier: Apache-2.0
"""Where the kernels run: a GPU when there is one, else Triton's repaired interpreter.

The choice is made before Triton is imported, and no test knows it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def _device() -> torch.device:
    for kind in ("cuda", "xpu"):
        if hasattr(torch, kind) and getattr(torch, kind).is_available():
            return torch.device(kind)
    return torch.device("cpu")


DEVICE = _device()
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    from kernels.interpreter import repair
    from kernels.interpreter_speed import speed_up

    repair()
    speed_up()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that every tensor of a test lives on."""
    return DEVICE


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.device.type == "meta" or not tensor.numel():
            return tensor
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float64):
            return tensor.fill_(float("nan"))
        raw = torch.tensor([], dtype=torch.uint8, device=tensor.device)
        raw.set_(tensor.untyped_storage()).fill_(0x7F)
        return tensor

    return made


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what `torch.empty` and its kin return with NaN, or with bytes 0x7F."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    yield
