# SPDX-License-Identifier: Apache-2.0
"""What checks found: one `Result` per check, one `Report` per run."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from stack.core.errors import CheckFailed, EnvironmentProblem, SourceError, command

Kind = Literal["static", "apply", "build", "lint", "test"]
Status = Literal["passed", "failed", "blocked"]
KINDS: tuple[Kind, ...] = ("build", "lint", "test")
COPIED = "copied"
"""The `step` of the comparison of a copied tree with a real build."""


class Figure(msgspec.Struct, frozen=True):
    """A test's failure on the tree before a step, and its figure on the tree after."""

    test: str
    before: str
    after: str


class Result(msgspec.Struct, frozen=True):
    """One check of one step.

    Attributes:
        step: a slug, or `base`, `tip`, `copied` or `-` (the whole release).
        status: `blocked` if it did not run because what it needs failed.
        seconds: wall time of the work, when it was done.
        cached: whether the result was stored before.
        summary: what a row or a failure's first line says.
        detail: the last lines of the output.
        tip: whether a test ran on the tip alone.
        typed: whether a lint ran mypy.
        figures: what a test measured.
        reads: the sha256 of what a test's run read of the files that all step tests may
            read, by name.
        sourceless: whether the release's archive cannot be had.
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
    typed: bool = False
    figures: tuple[Figure, ...] = ()
    reads: dict[str, str] = {}
    sourceless: bool = False

    @property
    def command(self) -> str:
        """The command that runs this one check by hand."""
        words = ["xpustack"]
        if self.kind == "static":
            return command(*words, "check", "--static")
        if self.kind == "apply":
            return command(*words, "apply", self.release, "--to", "DIR")
        words += ["check", self.release]
        if self.step not in ("base", "tip", COPIED, "-"):
            words.append(self.step)
        if self.tip or self.step == "tip":
            words.append("--tip")
        return command(*words, "--only", self.kind)


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
                {
                    **msgspec.to_builtins(msgspec.structs.replace(result, reads={})),
                    "command": result.command,
                }
                for result in self.results
            ],
        }
