# SPDX-License-Identifier: Apache-2.0
"""Where the kernels run: what `--device` names. No test knows it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from device_choice import RAN, take_device

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_DEVICE = pytest.StashKey[torch.device]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_DEVICE] = take_device(config)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that every tensor of a test lives on."""
    return request.config.stash[_DEVICE]


@pytest.fixture(autouse=True)
def lowered_launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Under `--device lowered`, keep which launches a test made, and its error."""
    ran = request.config.stash.get(RAN, None)
    if ran is None:
        yield
        return
    import compare

    launches, errors = len(ran), len(compare.figures)
    yield
    found = [f"{error:.1e} ({name})" for name, error in compare.figures[errors:]]
    for launch in ran[launches:]:
        launch.test = request.node.nodeid
        launch.error = max(found, default="bytes are equal")


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
