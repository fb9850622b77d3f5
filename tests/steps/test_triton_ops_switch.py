# SPDX-License-Identifier: Apache-2.0
"""One variable chooses DeepSeek-V4's Triton kernels over the ops of the pin."""

import pytest
from vllm import envs

NAME = "VLLM_XPU_DSV4_TRITON_OPS"


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert getattr(envs, NAME) is False


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True)])
def test_it_reads_the_environment(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, value)
    assert getattr(envs, NAME) is on


def test_compiled_graphs_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    off = envs.compile_factors()[NAME]
    monkeypatch.setenv(NAME, "1")
    assert envs.compile_factors()[NAME] != off
