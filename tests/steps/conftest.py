# SPDX-License-Identifier: Apache-2.0
"""The marker of the step tests."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "unchanged: what the step must leave alone; passes before it and after it",
    )
