# SPDX-License-Identifier: Apache-2.0
"""Calls of the command line within the test's own process."""

from collections.abc import Callable

import pytest
from fake_stack import FakeStack
from typer.testing import CliRunner, Result

from xpustack.__main__ import app

Call = Callable[..., Result]
"""Runs `xpustack` with the words that it gets."""


def calling(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A function that runs the command line in a stack, with the stack's cache."""
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    return lambda *words: CliRunner().invoke(app, list(map(str, words)))
