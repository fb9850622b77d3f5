# SPDX-License-Identifier: Apache-2.0
"""A tensor that cannot be loaded is named; an error of another cause keeps its type."""

from collections.abc import Iterable

import pytest
import torch
from helpers.loading import NAME, Model, message

FP8 = torch.zeros(4, 4).to(torch.float8_e4m3fn)


def test_a_wrong_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(
        monkeypatch, {"part.scale": torch.ones(1), NAME: torch.ones(2, 4).bfloat16()}
    )
    assert NAME in found and "(2, 4)" in found, found


def test_a_name_that_the_model_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(monkeypatch, {"part.strange": torch.ones(2)})
    assert "part.strange (torch.float32, (2,))" in found, found
    assert "named 'part.strange'" in found, found
    assert NAME not in found, f"the other parameters are listed: {found}"


@pytest.mark.unchanged
@pytest.mark.parametrize(
    "kind", [torch.OutOfMemoryError, MemoryError, RuntimeError, OSError]
)
def test_another_cause_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """It is no fault of the file."""

    class Full(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            for _ in weights:
                raise kind("the device is lost")
            return set()

    assert message(monkeypatch, {NAME: FP8}, made=Full) == "the device is lost"


def test_a_wrong_size_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            for _, tensor in weights:
                self.part.weight.data.copy_(tensor)
            return set()

    found = message(monkeypatch, {NAME: torch.ones(3, 4)}, made=Copies)
    assert f"{NAME} (torch.float32, (3, 4)) of the checkpoint" in found, found


def test_another_cause_says_when(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = MemoryError("the device is lost")

    class Full(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            for _ in weights:
                raise lost
            return set()

    message(monkeypatch, {NAME: FP8}, made=Full)
    notes = "".join(getattr(lost, "__notes__", []))
    assert f"while {NAME} " in notes, notes


@pytest.mark.unchanged
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_between_tensors_is_of_none(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    class Wrong(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            if when == "after":
                list(weights)
            raise ValueError("no layer is left")

    assert message(monkeypatch, {NAME: FP8}, made=Wrong) == "no layer is left"


@pytest.mark.unchanged
def test_a_checkpoint_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {NAME: FP8, "part.scale": torch.ones(1)}
    assert message(monkeypatch, tensors, torch.float8_e4m3fn) == ""
