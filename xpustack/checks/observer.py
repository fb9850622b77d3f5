# SPDX-License-Identifier: Apache-2.0
"""What a run of checks tells whoever watches it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xpustack.checks.results import Kind, Result


@dataclass(frozen=True)
class Check:
    """One check of a run. One that is not `shown` serves others: the report leaves
    it out unless it fails."""

    release: str
    step: str
    kind: Kind
    shown: bool = True

    def __str__(self) -> str:
        return f"{self.release} {self.step} {self.kind}"


class Observer(Protocol):
    """Receives a run's events, all from the thread that started the run. None of
    its methods may block."""

    def planned(self, checks: Sequence[Check]) -> None:
        """All checks of the run, once, before the first starts."""

    def started(self, check: Check) -> None:
        """Work on a check begins. Blocked checks never start."""

    def finished(self, check: Check, result: Result) -> None:
        """A check has its result."""

    def waiting(self) -> None:
        """Checks are running; called about once a second."""


class Unobserved:
    """The observer of a caller that wants to see nothing."""

    def planned(self, checks: Sequence[Check]) -> None:
        pass

    def started(self, check: Check) -> None:
        pass

    def finished(self, check: Check, result: Result) -> None:
        pass

    def waiting(self) -> None:
        pass
