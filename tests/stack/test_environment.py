# SPDX-License-Identifier: Apache-2.0
"""What a stored result depends on, and what it must not depend on."""

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from xpustack import environment

Tool = Callable[..., str]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """`environment.tool` over a package of three modules: judge → run → git."""
    package = tmp_path / "xpustack"
    package.mkdir()
    monkeypatch.setattr(environment, "_PACKAGE", package)
    (package / "judge.py").write_text("from xpustack import run\nLIMIT = 1\n")
    (package / "run.py").write_text(
        '"""Runs."""\n\nfrom xpustack.errors import Oops\nfrom xpustack.git import id\n'
    )
    (package / "git.py").write_text("id = 1\n")
    (package / "errors.py").write_text("class Oops(Exception):\n    pass\n")
    uncached: Tool = environment.tool.__wrapped__
    return uncached


def test_recipes_reach_what_they_use() -> None:
    for recipe in (["build"], ["lint"], ["steptest"]):
        assert {"git", "process"} <= set(environment.closure(recipe))


def test_imported_code_counts(tool: Tool, tmp_path: Path) -> None:
    before = tool("judge")
    (tmp_path / "xpustack" / "git.py").write_text("id = 2\n")
    assert tool("judge") != before


def test_comments_and_docstrings_do_not_count(tool: Tool, tmp_path: Path) -> None:
    before = tool("judge")
    path = tmp_path / "xpustack" / "run.py"
    path.write_text(
        '"""Runs, as it says."""\n\n'
        "from xpustack.errors import Oops  # why\nfrom xpustack.git import id\n"
    )
    assert tool("judge") == before


def test_messages_do_not_count(tool: Tool, tmp_path: Path) -> None:
    before = tool("judge")
    (tmp_path / "xpustack" / "errors.py").write_text("class Oops(ValueError): ...\n")
    assert tool("judge") == before


def test_a_kernel_update_keeps_results(monkeypatch: pytest.MonkeyPatch) -> None:
    uncached: Callable[[], str] = environment.lock.__wrapped__
    before = uncached()
    monkeypatch.setattr(platform, "release", lambda: "6.99.0")
    monkeypatch.setattr(platform, "platform", lambda *_, **__: "Linux-6.99.0")
    assert uncached() == before
