# SPDX-License-Identifier: Apache-2.0
"""The events of a run of checks, for whoever shows them."""

from collections.abc import Sequence
from dataclasses import dataclass

from xpustack.checks.results import Kind, Result


@dataclass(frozen=True)
class Check:
    """One check of a run.

    Attributes:
        shown: whether the report has it even if it passes. One that is not shown runs
            only because others need it.
    """

    release: str
    step: str
    kind: Kind
    shown: bool = True

    def __str__(self) -> str:
        return f"{self.release} {self.step} {self.kind}"


class Observer:
    """Receives the events of a run, all in the thread that started the run, and ignores
    them. Methods that take their place must not block."""

    def planned(self, checks: Sequence[Check]) -> None:
        """All checks of the run are known; called once, before the first starts."""

    def started(self, check: Check) -> None:
        """A check starts. Blocked checks never start."""

    def finished(self, check: Check, result: Result) -> None:
        """A check has its result."""

    def waiting(self) -> None:
        """Checks are running; called about once a second."""
