# SPDX-License-Identifier: Apache-2.0
"""The draft model's norms launch with as many warps as their rows need on XPU."""

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import kernel_trace, layout

EPS, STREAMS, TOKENS, HIDDEN = 1e-6, 4, 3, 96
NAME = f"{layout.OPS}.fused_mtp_input_rmsnorm"
Norms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def normalized(
    norms: ModuleType, seed: int = 0, hidden: int = HIDDEN
) -> tuple[Norms, Norms]:
    """The draft's input, its streams and its head, normalized by `norms` in bf16, and
    what they should be, in float64. The first token is at position 0."""
    torch.manual_seed(seed)
    x = torch.randn(TOKENS, hidden).bfloat16()
    streams = torch.randn(TOKENS, STREAMS, hidden).bfloat16()
    first, second = torch.randn(2, hidden).bfloat16()
    device = layout.device()
    positions = torch.arange(TOKENS)
    given = [one.to(device) for one in (x, positions, streams, first, second)]
    fused = function(norms, "fused_mtp_input_rmsnorm")
    head = function(norms, "mtp_shared_head_rmsnorm")
    got = (*fused(*given, EPS, STREAMS), head(given[0], given[3], EPS))
    masked = x.double() * (positions > 0)[:, None]
    wanted = (
        expected(masked, first),
        expected(streams.double(), second),
        expected(x.double(), first),
    )
    return got, wanted


def function(norms: ModuleType, name: str) -> Any:
    """`name`, or the launcher object that takes its place from v0.30.0 on."""
    return getattr(norms, name, None) or getattr(norms, f"_{name.upper()}_KERNEL")


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    variance = (x * x).mean(-1, keepdim=True)
    return x / (variance + EPS).sqrt() * weight.double()


def warps(
    norms: ModuleType, monkeypatch: pytest.MonkeyPatch, hidden: int = HIDDEN
) -> list[Any]:
    """What each launch of the norms asks for, with rows of `hidden` values."""
    with kernel_trace.options_of_launches(monkeypatch) as launches:
        normalized(norms, hidden=hidden)
    assert len(launches) == 2
    return [options.get("num_warps") for options in launches]


@pytest.mark.parametrize(
    ("hidden", "needed"), [(4096, 8), (7168, 16)], ids=["Flash", "Pro"]
)
def test_as_many_warps_as_a_row_needs(
    hidden: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked in warps(layout.module(NAME), monkeypatch, hidden):
        assert asked == needed, f"launched with {asked} warps"


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_rocm_launches_with_tritons_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norms = layout.module(NAME)
    platforms = layout.module("vllm.platforms")
    rocm = layout.another_platform(platforms.current_platform, rocm=True)
    monkeypatch.setattr(platforms, "current_platform", rocm)
    spec = importlib.util.spec_from_file_location(NAME, norms.__file__)
    assert spec and spec.loader
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert set(warps(other, monkeypatch, hidden=7168)) <= {None, 4}


@pytest.mark.unchanged
@pytest.mark.parametrize("seed", range(3))
def test_the_norms_are_right(seed: int) -> None:
    for got, wanted in zip(*normalized(layout.module(NAME), seed), strict=True):
        torch.testing.assert_close(got.cpu().double(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.unchanged
def test_short_rows_keep_tritons_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(warps(layout.module(NAME), monkeypatch, hidden=1024)) <= {None, 4}
