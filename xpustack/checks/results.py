# SPDX-License-Identifier: Apache-2.0
"""What checks yield: one result a check, one report a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from xpustack.core.errors import EnvironmentProblem, command
from xpustack.steptest.verdict import Figure

Kind = Literal["static", "apply", "build", "lint", "test"]
Status = Literal["passed", "failed", "blocked"]
KINDS: tuple[Kind, ...] = ("build", "lint", "test")
DERIVED = "derived"
"""Stands for a step in the comparison of a derived tree with a real build."""


class Result(msgspec.Struct, frozen=True):
    """One check of one step. `blocked`: not run, since what it needs failed.

    `step` is a slug, or `base`, `tip` or `-` (the whole release); `detail` holds
    the last lines to look at, `seconds` is the work's wall time when it was done,
    `figures` are those of a test.
    """

    release: str
    step: str
    kind: Kind
    status: Status
    seconds: float = 0.0
    cached: bool = False
    summary: str = ""
    detail: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tip: bool = False
    figures: tuple[Figure, ...] = ()

    @property
    def command(self) -> str:
        """The command that runs this one check by hand."""
        words = ["python", "-m", "xpustack"]
        if self.kind == "static":
            return command(*words, "check", "--static")
        if self.kind == "apply":
            return command(*words, "apply", self.release, "--to", "DIR")
        words += ["check", self.release]
        if self.step not in ("base", "tip", DERIVED, "-"):
            words.append(self.step)
        if self.tip or self.step == "tip":
            words.append("--tip")
        return command(*words, "--only", self.kind)


def stored_pass(
    value: Mapping[str, Any] | None, kind: Kind, release: str, step: str
) -> Result | None:
    """What the cache holds under a key, if it is a pass of this very check.

    None if there is nothing, if it is damaged, and if it belongs to another check.
    """
    if value is None:
        return None
    try:
        result = msgspec.convert(value, Result)
    except msgspec.ValidationError:
        return None
    here = (result.kind, result.release, result.step, result.status)
    return result if here == (kind, release, step, "passed") else None


@dataclass(frozen=True)
class Report:
    """All results of a run, in the order of releases and steps.

    `problem` is the machine's failure that ended the run before its end, `not_run`
    how many checks it left undone.
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
        """Failed and blocked checks: what is not proven."""
        return len(self.results) - self.passed

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
