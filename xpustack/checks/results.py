# SPDX-License-Identifier: Apache-2.0
"""The results of a run of checks as one `Report`, and those that are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from xpustack.core.errors import CheckFailed, EnvironmentProblem, SourceError
from xpustack.series.result import Kind, Result


def stored_pass(
    value: Mapping[str, Any] | None, kind: Kind, release: str, step: str
) -> Result | None:
    """A stored value as the pass of this very check.

    None if there is no value, if it is damaged, or if it belongs to another check.
    """
    if value is None:
        return None
    try:
        result = msgspec.convert(value, Result)
    except msgspec.ValidationError:
        return None
    stored = (result.kind, result.release, result.step, result.status)
    return result if stored == (kind, release, step, "passed") else None


@dataclass(frozen=True)
class Report:
    """All results of a run, in the order of releases and steps.

    Attributes:
        problem: the machine's failure that ended the run early.
        not_run: how many checks the run left out because of it.
    """

    results: tuple[Result, ...]
    seconds: float
    problem: EnvironmentProblem | None = None
    not_run: int = 0

    @property
    def passed(self) -> int:
        return sum(result.status == "passed" for result in self.results)

    @property
    def failed(self) -> int:
        """Failed and blocked checks."""
        return len(self.results) - self.passed

    @property
    def exit_code(self) -> int:
        """0, the code of a failed check, or that of an archive which cannot be had, if
        that alone failed."""
        failed = [result for result in self.results if result.status != "passed"]
        if not failed:
            return 0
        sourceless = all(result.sourceless for result in failed)
        return SourceError.exit_code if sourceless else CheckFailed.exit_code

    def to_json(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "failed": self.failed,
            "not_run": self.not_run,
            "seconds": round(self.seconds, 3),
            "results": [
                {**msgspec.to_builtins(result), "command": result.command}
                for result in self.results
            ],
        }
