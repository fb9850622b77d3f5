# SPDX-License-Identifier: Apache-2.0
"""A stack to be damaged, and the command line in it."""

from pathlib import Path

import pytest
from calls import Call, calling
from fake_stack import FakeStack


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    """A stack of this test alone, whose v1.0 has three steps."""
    return three_steps.copy(tmp_path)


@pytest.fixture
def call(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A function that runs the command line in `stack`."""
    return calling(stack, monkeypatch)
