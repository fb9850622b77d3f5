# SPDX-License-Identifier: Apache-2.0
"""Exponents of UE8M0 scales, and a device whose log2 is off by one unit in the last
place, which at a power of two may lie above the integer."""

import importlib.util
from typing import Any

import pytest
import torch

from . import layout

E4M3, E2M1 = 448.0, 6.0
SHARED = "vllm.v1.attention.ops.ue8m0"


@pytest.fixture
def coarse_log2(monkeypatch: pytest.MonkeyPatch) -> None:
    """log2 one unit in the last place too large, where kernels are interpreted."""
    interpreter = layout.module("triton.runtime.interpreter")

    def create_log2(self: Any, x: Any) -> Any:
        exact = torch.as_tensor(x.data).log2()
        above = torch.nextafter(exact, torch.tensor(torch.inf)).numpy()
        return interpreter.TensorHandle(above, x.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_log2", create_log2)


def choose_on_another_platform(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The kernels of these modules take what `SHARED` has where it is not imported on
    XPU. Nothing changes on a tree that lacks it."""
    if not (spec := importlib.util.find_spec(SHARED)):
        return
    platforms = layout.module("vllm.platforms")
    other = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        another = layout.another_platform(platforms.current_platform)
        patch.setattr(platforms, "current_platform", another)
        assert spec.loader
        spec.loader.exec_module(other)
    for module in map(layout.module, names):
        for chosen in ("ue8m0_exponent", "ue8m0_scale"):
            if hasattr(module, chosen):
                monkeypatch.setattr(module, chosen, getattr(other, chosen))


def at_powers(exponents: torch.Tensor, largest: float = E4M3) -> torch.Tensor:
    """largest·2^k, exact in bfloat16."""
    return torch.ldexp(
        torch.full_like(exponents, largest, dtype=torch.float32), exponents
    )


def check(scales: torch.Tensor, wanted: torch.Tensor) -> None:
    """`scales`, fp32, are 2^wanted."""
    got = scales.cpu().double().log2()
    wrong = int((got != wanted).sum())
    print(f"figure: {wrong} of {wanted.numel()} exponents differ")
    assert not wrong, f"{wrong} of {wanted.numel()} exponents differ: {got - wanted}"


def from_bytes(encoded: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(encoded.shape), encoded.cpu().int() - 127)


def blocks(amax: torch.Tensor, size: int) -> torch.Tensor:
    """`[len(amax), size]` in bfloat16: each row has its amax once, the rest below."""
    rows = (amax[:, None] * torch.linspace(-0.5, 0.5, size)).to(torch.bfloat16)
    rows[:, size // 3] = -amax
    return rows


def plain_rope(positions: int, dim: int = 64) -> torch.Tensor:
    """A table of cosines and sines that rotates nothing."""
    table = torch.zeros(positions, dim, device=layout.device())
    table[:, : dim // 2] = 1
    return table
