# SPDX-License-Identifier: Apache-2.0
"""The command line in a stack of the test's own."""

import pytest
from calls import Call, calling
from fake_stack import FakeStack


@pytest.fixture
def call(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A function that runs the command line in `stack`."""
    return calling(stack, monkeypatch)
