# SPDX-License-Identifier: Apache-2.0
"""Arguments are checked once per layout, and every part of a layout counts."""

import pytest
import torch

from kernels.xpu_dsv4 import _checks
from kernels.xpu_dsv4._checks import check_once, fail


class Check:
    """A check that counts its calls and refuses tensors of one row."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor, width: int) -> None:
        self.calls += 1
        if x.shape[0] == 1:
            fail("x.shape", list(x.shape), "more than one row")


def test_a_layout_is_checked_once() -> None:
    check = Check()
    for _ in range(3):
        check_once(check, torch.randn(4, 8), 2)
    assert check.calls == 1


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 8).bfloat16(),
        torch.zeros(5, 8),
        torch.zeros(8, 4).t(),
        torch.zeros(4, 8, device="meta"),
        torch.zeros(33)[1:].view(4, 8),
        None,
    ],
    ids=["type", "shape", "strides", "device", "alignment", "None"],
)
def test_another_layout_is_checked_too(other: torch.Tensor | None) -> None:
    calls = []
    for x in (torch.zeros(4, 8), other):
        check_once(calls.append, x)
    assert len(calls) == 2


def test_what_is_no_tensor_counts_by_its_value() -> None:
    check = Check()
    for width in (1, 2, 1):
        check_once(check, torch.zeros(4, 8), width)
    assert check.calls == 2


def test_what_was_refused_is_refused_again() -> None:
    check = Check()
    for _ in range(2):
        with pytest.raises(ValueError, match="more than one row"):
            check_once(check, torch.zeros(1, 8), 2)
    assert check.calls == 2


def test_layouts_are_not_collected_without_end(monkeypatch) -> None:
    monkeypatch.setattr(_checks, "MOST_LAYOUTS", 8)
    check = Check()
    for width in range(50):
        check_once(check, torch.zeros(4, 8), width)
    assert check.calls == 50
    assert len(_checks._passed) <= 8
