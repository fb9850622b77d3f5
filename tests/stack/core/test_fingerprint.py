# SPDX-License-Identifier: Apache-2.0
"""What a stored result depends on, and what it must not depend on."""

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from stack.core import fingerprint

Tool = Callable[..., str]
IMPORTS = """\
from stack.core import git
from stack.core.errors import Oops
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """`fingerprint.tool` over a package of three modules: judge → run → git."""
    package = tmp_path / "stack"
    monkeypatch.setattr(fingerprint, "_PACKAGE", package)
    (package / "core").mkdir(parents=True)
    (package / "judge.py").write_text("from stack import run\nLIMIT = 1\n")
    (package / "run.py").write_text(f'"""Runs."""\n\n{IMPORTS}')
    (package / "core" / "git.py").write_text("id = 1\n")
    (package / "core" / "errors.py").write_text("class Oops(Exception):\n    pass\n")
    uncached: Tool = fingerprint.tool.__wrapped__
    return uncached


def test_recipes_reach_what_they_use() -> None:
    for recipe, used in (
        ("builds.build", "core.checkout"),
        ("lint.linter", "core.checkout"),
        ("steptest.step_test", "forks.program"),
    ):
        closure = fingerprint.module_closure([recipe])
        assert {used, "core.process"} <= dict(closure).keys()


def test_imported_code_counts(tool: Tool, tmp_path: Path) -> None:
    before = tool("judge")
    (tmp_path / "stack" / "core" / "git.py").write_text("id = 2\n")
    assert tool("judge") != before


def test_comments_and_docstrings_do_not_count(tool: Tool, tmp_path: Path) -> None:
    before = tool("judge")
    path = tmp_path / "stack" / "run.py"
    path.write_text(f'"""Runs, as it says."""\n\n# Why.\n{IMPORTS}')
    assert tool("judge") == before


def test_messages_do_not_count(tool: Tool, tmp_path: Path) -> None:
    before = tool("judge")
    path = tmp_path / "stack" / "core" / "errors.py"
    path.write_text("class Oops(ValueError): ...\n")
    assert tool("judge") == before


def test_a_kernel_update_keeps_results(monkeypatch: pytest.MonkeyPatch) -> None:
    uncached: Callable[[], str] = fingerprint.lock.__wrapped__
    before = uncached()
    monkeypatch.setattr(platform, "release", lambda: "6.99.0")
    monkeypatch.setattr(platform, "platform", lambda *_, **__: "Linux-6.99.0")
    assert uncached() == before
