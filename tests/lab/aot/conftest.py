# SPDX-License-Identifier: Apache-2.0
"""Leave out, with the reason, the tests that need the missing front end."""

from pathlib import Path

from lab.aot.compiler.front_end import missing

_NEED_NONE = {"test_front_end.py"}


def pytest_report_header() -> str | None:
    reason = missing()
    return f"only {sorted(_NEED_NONE)} run: {reason}" if reason else None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if missing() and collection_path.name.startswith("test_"):
        return collection_path.name not in _NEED_NONE
    return None
