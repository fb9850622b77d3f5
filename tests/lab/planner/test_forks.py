# SPDX-License-Identifier: Apache-2.0
"""Whose fault it is that a start ends in an error."""

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PROGRAMS = Path(__file__).parents[3] / "lab/planner/programs"
RELEASE = """
import torch

def purpose(ranks):
    if ranks == 16:
        raise ValueError(
            "16 ranks "
            "do not divide"
        )
    assert ranks != 12, "twelve"

def values(tensor):
    return tensor.item()

def names(config):
    return config.missing
"""


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("forks")


@pytest.fixture
def release(tmp_path: Path) -> dict[str, Any]:
    """A module of a release."""
    file = tmp_path / "attention.py"
    file.write_text(RELEASE)
    names = {"__name__": "vllm.attention"}
    exec(compile(RELEASE, str(file), "exec"), names)
    return names


def test_what_the_release_raises_is_its_refusal(
    forks: ModuleType, release: dict[str, Any]
) -> None:
    for ranks, says in ((16, "16 ranks do not divide"), (12, "twelve")):
        with pytest.raises(forks.Refused, match=f"^{says}$"):
            forks.forked([lambda ranks=ranks: release["purpose"](ranks)])


@pytest.mark.parametrize("name", ["values", "names", "ours", "emulation"])
def test_everything_else_is_a_fault_of_the_planner(
    forks: ModuleType, release: dict[str, Any], name: str
) -> None:
    def ours() -> None:
        raise RuntimeError("rank 16 of a host with 16 XPUs")

    works: dict[str, Callable[[], Any]] = {
        "values": lambda: release["values"](torch.empty(1, device="meta")),
        "names": lambda: release["names"](None),
        "ours": ours,
        "emulation": lambda: os._exit(9),
    }
    says = {"ours": "rank 16 of a host", "emulation": "ended with status"}
    with pytest.raises(forks.Fault, match=says.get(name, "attention.py")):
        forks.forked([works[name]])


def test_answers_come_in_order_from_as_many_processes_as_may_run(
    forks: ModuleType, tmp_path: Path
) -> None:
    def work(number: int) -> int:
        (tmp_path / str(number)).touch()
        time.sleep(0.2 - number / 50)
        at_once = len(list(tmp_path.iterdir()))
        (tmp_path / str(number)).unlink()
        return number if at_once <= 2 else -1

    works = [lambda number=number: work(number) for number in range(6)]
    assert forks.forked(works, 2) == list(range(6))
