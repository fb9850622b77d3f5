# SPDX-License-Identifier: Apache-2.0
"""Where a step stands on a base."""

import re
from dataclasses import dataclass
from typing import Literal

from stack.series.result import Result
from stack.series.tree import Series, StepTree
from stack.upstream.form import upstream_test

State = Literal["stands", "upstream", "conflict", "waits", "fails"]

_SUMMARY = re.compile(r"(\d+) tests, (\d+) fail before(?:, (\d+) on a CPU too)?")


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

    @property
    def test_file(self) -> str:
        """The test's path upstream."""
        return upstream_test(self.step.step)

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many tests there are, fail before, and need no XPU."""
        assert self.test is not None, "it stands"
        match = _SUMMARY.match(self.test.summary)
        assert match is not None, self.test.summary
        tests, red, on_cpu = match.groups(default="0")
        return int(tests), int(red), int(on_cpu)
