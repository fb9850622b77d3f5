# SPDX-License-Identifier: Apache-2.0
"""Looks up what the checks have proven of a series, without running any."""

from dataclasses import dataclass

from xpustack.checks.checker import Checker
from xpustack.checks.results import Result
from xpustack.lint.linter import steps_are_typed
from xpustack.series.tree import Series, Step


@dataclass(frozen=True)
class Proof:
    """The stored green checks of one step as it is now; None where there are none.

    Attributes:
        built: whether both of its trees are built.
    """

    step: Step
    built: bool
    lint: Result | None
    test: Result | None

    @property
    def missing(self) -> tuple[str, ...]:
        """The kinds of check that are not proven."""
        kinds = (("build", self.built), ("lint", self.lint), ("test", self.test))
        return tuple(kind for kind, proven in kinds if not proven)


def proofs(checker: Checker, series: Series) -> list[Proof]:
    """What is proven of each step of a series, by its trees.

    Raises:
        SeriesError: a step names no test module, or one that does not exist.
    """
    last = len(series.steps)
    built = [checker.planned(tree, last).installed.is_dir() for tree in series.trees]
    types = steps_are_typed(checker.project, series)
    return [
        Proof(
            after.step,
            built[after.index - 1] and built[after.index],
            checker.known_lint(after.slug, after.parent, after, types=types),
            checker.known_test(after, last),
        )
        for after in series.steps
    ]
