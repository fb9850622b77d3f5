# SPDX-License-Identifier: Apache-2.0
"""Looks up what the checks have proven of a series, without running any."""

from dataclasses import dataclass

from xpustack.base.store import Store
from xpustack.builds import build
from xpustack.builds.build import build_version
from xpustack.builds.installed import Build
from xpustack.checks.results import Kind, Result, stored_pass
from xpustack.core.cache import Cache
from xpustack.lint.linter import lint_key, steps_are_typed
from xpustack.series.tree import Series, Step
from xpustack.steptest.material import Support
from xpustack.steptest.step_test import StepTest


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


def proofs(support: Support, cache: Cache, series: Series) -> list[Proof]:
    """What is proven of each step of a series, by its trees.

    Args:
        support: one for all series, because releases share the tests that it reads.

    Raises:
        SeriesError: a step names no test module, or one that does not exist.
    """
    builds = _builds(cache, series)
    types = steps_are_typed(support.project, series)
    proofs = []
    for after in series.steps:
        before = after.parent
        old, new = builds[before.index], builds[after.index]
        test = StepTest.of(support, after.release, after.step, old, new)
        keys = (lint_key(before, after, types=types), test.key)
        proofs.append(
            Proof(
                after.step,
                old.installed.is_dir() and new.installed.is_dir(),
                _result(cache, keys[0], "lint", after.step),
                _result(cache, keys[1], "test", after.step),
            )
        )
    return proofs


def _builds(cache: Cache, series: Series) -> list[Build]:
    """The builds of a series as they would be, whether they exist or not."""
    store, last = Store(cache), len(series.steps)
    return [
        build.expected_build(cache, store, tree, build_version(tree, last))
        for tree in series.trees
    ]


def _result(cache: Cache, key: str, kind: Kind, step: Step) -> Result | None:
    return stored_pass(cache.results_get(key), kind, step.release, step.slug)
