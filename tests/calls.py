# SPDX-License-Identifier: Apache-2.0
"""Calls of the command line within the test's own process."""

from collections.abc import Callable

import pytest
from command_line import Result, invoke
from fake_stack import FakeStack

Call = Callable[..., Result]
"""Runs `xpustack` with the words that it gets."""


def calling(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A function that runs the command line in a stack, with the stack's cache."""
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    return invoke
