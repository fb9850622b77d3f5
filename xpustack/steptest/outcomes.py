# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin, copied beside a step's test, that writes what came out.

It imports nothing of xpustack: inside the run only pytest and vLLM exist. The
JSON file named by `XPUSTACK_OUTCOMES` gets a list `tests` and a list
`collection`. A test's `figure` is what it printed after that word; a failure's
`text` is the exception alone, with its causes, never the test's source, in
which `Fails-before` could match itself.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_FIGURE = "figure: "
_RANK = {"passed": 0, "skipped": 1, "xpassed": 2, "xfailed": 3, "error": 4, "failed": 5}


class Recorder:
    """Keeps one entry a test: the worst of its set-up, call and tear-down."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.collection: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if report.outcome == "passed" else "xfailed"
        elif report.failed and report.when != "call":
            outcome = "error"
        entry = self.tests.setdefault(
            report.nodeid,
            {
                "id": report.nodeid,
                "outcome": "passed",
                "unchanged": "unchanged" in report.keywords,
                "may_skip": "may_skip" in report.keywords,
                "import_error": False,
                "text": "",
                "seconds": 0.0,
                "figure": "",
            },
        )
        entry["seconds"] += report.duration
        if report.when == "call":
            lines = report.capstdout.splitlines()
            said = [line.removeprefix(_FIGURE) for line in lines if _FIGURE in line]
            entry["figure"] = "; ".join(said)
        if _RANK[outcome] > _RANK[entry["outcome"]]:
            entry["outcome"], entry["text"] = outcome, _reason(report.longrepr)

    def pytest_exception_interact(
        self, call: pytest.CallInfo[object], report: pytest.TestReport
    ) -> None:
        """Called after the report of what neither skips nor is marked xfail."""
        entry = self.tests.get(report.nodeid)
        if entry is not None and call.excinfo is not None:
            entry["text"] = describe(call.excinfo.value)
            entry["import_error"] = isinstance(call.excinfo.value, ImportError)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.collection.append(
                {
                    "id": report.nodeid,
                    "outcome": report.outcome,
                    "text": _reason(report.longrepr),
                }
            )

    def pytest_sessionfinish(self) -> None:
        content = {"tests": list(self.tests.values()), "collection": self.collection}
        path = Path(os.environ["XPUSTACK_OUTCOMES"])
        path.write_text(json.dumps(content), encoding="utf-8")


def _reason(longrepr: object) -> str:
    """Why it skipped, or the whole traceback."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def describe(error: BaseException | None) -> str:
    """An exception as `Type: message`, followed by what caused it."""
    lines: list[str] = []
    while error is not None and len(lines) < 8:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or (
            None if error.__suppress_context__ else error.__context__
        )
    return "\n".join(lines)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "unchanged: must pass on the tree before the step as well",
        "may_skip: a skip of this test, with its reason, is no failure",
        "compiled: tests what torch.compile makes, so it is on for the module",
    ):
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(Recorder(), "xpustack-outcomes")
