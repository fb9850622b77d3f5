# SPDX-License-Identifier: Apache-2.0
"""The markers of the step tests, and which of them run on other platforms."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "unchanged: what the step must leave alone; passes before it and after it",
        "any_platform: needs no XPU, so it runs on a CPU as well",
        "compiled: relies on torch.compile, which is off elsewhere",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an XPU where there is none."""
    from vllm.platforms import current_platform

    if current_platform.is_xpu():
        return
    for item in items:
        if "any_platform" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an XPU"))
