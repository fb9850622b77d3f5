# SPDX-License-Identifier: Apache-2.0
"""Builds, lints and tests trees, keeps what passed, and says what is proven."""

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from stack.base.store import Store
from stack.builds.build import build, build_version, compare, expected_build, found
from stack.builds.installed import Build
from stack.core.cache import Cache, writing
from stack.core.process import Runner
from stack.core.project import Project
from stack.lint.linter import Linter, lint_key, steps_are_typed
from stack.series.result import COPIED, Kind, Result
from stack.series.tree import Series, Step, Tree
from stack.steptest.material import Support, material_of
from stack.steptest.server import warm_server
from stack.steptest.step_test import StepTest


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


class Checker:
    """What the checks of a run share: the project's files as they are now, processes,
    the server of builds and step tests, and the linter.

    Any number of threads may use it. An exception in its block, an interrupt included,
    ends its processes; the end of the block ends the servers and removes what was laid
    out.

    Where a tree is asked for, `last` is the number of steps of the whole series: the
    version of its build says which step it is, unless it has all of them.
    """

    def __init__(self, project: Project, cache: Cache) -> None:
        self.project, self.cache, self.store = project, cache, Store(cache)
        self.support, self.runner = Support.of(project), Runner()
        self.server = warm_server(self.runner)
        self._linter = Linter(self.runner, self.store)
        self._stack, self._guard = contextlib.ExitStack(), threading.Lock()
        self._laid_out: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.runner.stop()
        self._linter.close()
        self.server.close()
        self._stack.close()

    def laid_out(self) -> Path:
        """The folder that has the support of step tests, for all runs: what one of them
        compiles the others take.

        Raises:
            EnvironmentProblem: the disk is full, or writing there is denied.
        """
        with self._guard:
            if self._laid_out is None:
                folder = self._stack.enter_context(self.cache.scratch())
                with writing(folder):
                    self.support.lay_out(folder)
                self._laid_out = folder
            return self._laid_out

    def planned(self, tree: Tree, last: int) -> Build:
        """The build that a tree has or would have; it is not looked at."""
        return expected_build(self.store, tree, build_version(tree, last))

    def build(self, tree: Tree, last: int) -> Build:
        """The tree's build, verified, or made anew if it is absent or damaged.

        Raises:
            As `builds.build`.
        """
        return build(self.server, self.store, tree, build_version(tree, last))

    def built(self, tree: Tree, last: int, name: str) -> Result:
        """The build of a tree as a result. One that an earlier run left is verified
        only where something runs on it."""
        planned = self.planned(tree, last)
        done = planned if found(planned) else self.build(tree, last)
        return Result(
            tree.release.name,
            name,
            "build",
            "passed",
            done.seconds,
            done.cached,
            done.version,
        )

    def compared(self, tree: Tree, copy: Build, name: str) -> Result:
        """The comparison of a copied tree with a real build of it as a result.

        Raises:
            As `builds.build.compare`.
        """
        begin = time.monotonic()
        count = compare(self.server, self.store, tree, copy)
        return Result(
            tree.release.name,
            COPIED,
            "build",
            "passed",
            time.monotonic() - begin,
            summary=f"{name}: {count} members as a real build has them",
        )

    def known_lint(
        self, name: str, before: Tree, after: Tree, *, types: bool
    ) -> Result | None:
        """The stored pass of a tree's lint over another. What passed with mypy passed
        without it."""
        keys = [lint_key(before, after, types=each) for each in {types, True}]
        known = (self.stored(key, "lint", after.release.name, name) for key in keys)
        return next(filter(None, known), None)

    def lint(
        self,
        name: str,
        before: Tree,
        after: Tree,
        *,
        types: bool,
        daemon: bool = False,
    ) -> Result:
        """Lint what a tree changes of another; a stored pass is taken. Arguments are
        those of `Linter.lint`.

        Raises:
            As `Linter.lint`.
        """
        if known := self.known_lint(name, before, after, types=types):
            return known
        result = self._linter.lint(name, before, after, types=types, daemon=daemon)
        return self.keep(lint_key(before, after, types=types), result)

    def step_test(
        self, step: Step, before: Tree | None, after: Tree, last: int
    ) -> StepTest:
        """A step's test, as its files are now, on the trees before and after it, or on
        the latter alone.

        Raises:
            SeriesError: the step names no test module, or one that does not exist.
        """
        material = material_of(self.support, step)
        old = self.planned(before, last) if before is not None else None
        kernels = after.release.xpu_kernels.version
        return StepTest(step, material, old, self.planned(after, last), kernels)

    def test(self, step: Step, before: Tree | None, after: Tree, last: int) -> Result:
        """Run a step's test, on verified builds; a stored pass is taken.

        Raises:
            As `step_test`, `build` and `StepTest.run`.
        """
        test = self.step_test(step, before, after, last)
        if known := self.stored(test.key, "test", step.release, step.slug):
            return known
        test = test.now()
        for tree in (before, after):
            if tree is not None:
                self.build(tree, last)
        done = test.run(self.server, self.cache, self.laid_out())
        return self.keep(test.key, done)

    def proofs(self, series: Series) -> list[Proof]:
        """What is proven of each step of a series, by its trees; nothing runs.

        Raises:
            SeriesError: a step names no test module, or one that does not exist.
        """
        last = len(series.steps)
        built = [self.planned(tree, last).installed.is_dir() for tree in series.trees]
        types = steps_are_typed(self.project, series)
        proofs = []
        for after in series.steps:
            before, step = after.parent, after.step
            test = self.step_test(step, before, after, last)
            proofs.append(
                Proof(
                    step,
                    built[before.index] and built[after.index],
                    self.known_lint(step.slug, before, after, types=types),
                    self.stored(test.key, "test", step.release, step.slug),
                )
            )
        return proofs

    def stored(self, key: str, kind: Kind, release: str, step: str) -> Result | None:
        """The stored pass of this very check; None if there is none, if it is damaged,
        if it belongs to another check, or if a file that its run read changed."""
        try:
            result = msgspec.convert(self.cache.results_get(key), Result)
        except msgspec.ValidationError:
            return None
        stored = (result.kind, result.release, result.step, result.status)
        if stored != (kind, release, step, "passed"):
            return None
        if not self.support.has(result.reads):
            return None
        return msgspec.structs.replace(result, cached=True)

    def keep(self, key: str, result: Result) -> Result:
        """Store a result that passed; a failure is looked at again each time."""
        if result.status == "passed":
            self.cache.results_put(key, msgspec.to_builtins(result))
        return result
