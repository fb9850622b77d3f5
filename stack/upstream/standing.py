# SPDX-License-Identifier: Apache-2.0
"""Where a step stands on a base."""

from dataclasses import dataclass
from typing import Literal

from stack.series.result import Result
from stack.series.tree import Series, StepTree

State = Literal["stands", "upstream", "conflict", "waits", "fails"]


@dataclass(frozen=True)
class Standing:
    """Where a step stands.

    Attributes:
        state: `stands` with a tested tree; `upstream` has the change; `conflict` with
            the base; `waits` for a step that does not stand; `fails` its own test
            wherever it was put.
        needs: the earlier steps that it needs, oldest first.
        series: the base, those steps and the step; None if it does not stand.
        test: its own test, red on the tree before and green on its tree.
        evidence: why it does not stand, or why upstream has it.
    """

    step: StepTree
    state: State
    needs: tuple[str, ...] = ()
    series: Series | None = None
    test: Result | None = None
    evidence: str = ""

    @property
    def slug(self) -> str:
        return self.step.slug

    @property
    def text(self) -> str:
        """Such as `alone`, or `after merge-once`."""
        if self.state == "stands":
            return f"after {', '.join(self.needs)}" if self.needs else "alone"
        return self.state
