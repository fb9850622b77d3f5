# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin, copied beside a step's test, that writes the outcomes.

It imports nothing of xpustack: inside the run only pytest and vLLM exist. It writes
the lists `tests` and `collection` to the JSON file that `XPUSTACK_OUTCOMES` names.
A test's `figure` is what it printed after that word. A failure's `text` is the
exception with its causes, never the test's source: there `Fails-before` could match
itself.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_FIGURE = "figure: "
_RANK = {"passed": 0, "skipped": 1, "xpassed": 2, "xfailed": 3, "error": 4, "failed": 5}


class OutcomeRecorder:
    """Keeps one outcome per test: the worst of its set-up, call and tear-down."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.collection: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if report.outcome == "passed" else "xfailed"
        elif report.failed and report.when != "call":
            outcome = "error"
        test = self.tests.setdefault(
            report.nodeid,
            {
                "id": report.nodeid,
                "outcome": "passed",
                "unchanged": "unchanged" in report.keywords,
                "any_platform": "any_platform" in report.keywords,
                "may_skip": "may_skip" in report.keywords,
                "import_error": False,
                "text": "",
                "seconds": 0.0,
                "figure": "",
            },
        )
        test["seconds"] += report.duration
        if report.when == "call":
            lines = report.capstdout.splitlines()
            figures = [line.removeprefix(_FIGURE) for line in lines if _FIGURE in line]
            test["figure"] = "; ".join(figures)
        if _RANK[outcome] > _RANK[test["outcome"]]:
            test["outcome"], test["text"] = outcome, _reason(report.longrepr)

    def pytest_exception_interact(
        self, call: pytest.CallInfo[object], report: pytest.TestReport
    ) -> None:
        """pytest calls this after the report of a failure, unless marked xfail."""
        test = self.tests.get(report.nodeid)
        if test is not None and call.excinfo is not None:
            test["text"] = describe(call.excinfo.value)
            test["import_error"] = isinstance(call.excinfo.value, ImportError)

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
    """The reason of a skip, or the whole traceback."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def describe(error: BaseException | None) -> str:
    """An exception as `Type: message`, followed by its causes."""
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
        "any_platform: needs no XPU, so it must pass on a CPU as well",
        "may_skip: a skip of this test, with its reason, is no failure",
        "compiled: tests what torch.compile makes, so it is on for the module",
    ):
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(OutcomeRecorder(), "xpustack-outcomes")
