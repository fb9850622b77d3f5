# SPDX-License-Identifier: Apache-2.0
"""The markers of the step tests."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "unchanged: what the step must leave alone; passes before it and after it",
        "compiled: relies on torch.compile, which is off elsewhere",
    ):
        config.addinivalue_line("markers", line)
