# SPDX-License-Identifier: Apache-2.0
"""The checks of one release as tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.builds.build import build, build_version, expected_build, found
from xpustack.builds.copy import origin_of
from xpustack.builds.installed import Build
from xpustack.checks.results import Kind, Result, stored_pass, test_result
from xpustack.checks.schedule import Task
from xpustack.core.cache import Cache
from xpustack.core.errors import EnvironmentProblem, StackError
from xpustack.core.process import Runner
from xpustack.forks.server import Server
from xpustack.lint.linter import Linter, lint_key, steps_are_typed
from xpustack.series.apply import trees_before_failure
from xpustack.series.order import read_order, require_step
from xpustack.series.tree import Series, Step, StepTree, Tree
from xpustack.steptest.material import Support
from xpustack.steptest.step_test import StepTest

_FINDINGS_SHOWN = 20


@dataclass(frozen=True)
class CopiedTree:
    """A tree whose build this run copies from another tree's, and its task."""

    tree: Tree
    build: Build
    task: Task


class Planner:
    """Turns one release into tasks."""

    def __init__(
        self,
        support: Support,
        cache: Cache,
        store: Store,
        release: Release,
        runner: Runner,
        server: Server,
        linter: Linter,
    ) -> None:
        self._support, self._project = support, support.project
        self._cache, self._store = cache, store
        self._release, self._runner = release, runner
        self._server, self._linter = server, linter
        self._builds: dict[int, Build] = {}
        self._build_tasks: dict[int, Task] = {}
        self._origins: list[Task] = []
        self._copied: list[CopiedTree] = []
        self._last = 0

    def plan(
        self, step: str | None, only: Kind | None, tip: bool
    ) -> tuple[list[Result], list[Task]]:
        if step is not None:
            slugs = read_order(self._project, self._release.name)
            require_step(slugs, step, self._release.name)
        series, problem = trees_before_failure(
            self._store, self._project, self._release
        )
        if isinstance(problem, EnvironmentProblem):
            raise problem
        if series is None:
            return self._broken((), [], problem, step), []
        slugs = read_order(self._project, self._release.name)
        self._last = len(slugs)
        errors = self._broken(series.steps, slugs, problem, step)
        whole = len(series.steps) == self._last
        if tip:
            tasks = self._tip(series, step) if whole else []
        else:
            tasks = self._steps(series, step)
            if whole and step is None:
                tasks += self._types_of_tip(series)
        kinds = {only} if only else {"build", "lint", "test"}
        for task in tasks:
            task.shown = task.kind in kinds
        for task in self._origins:
            task.shown = False
        tasks = [*self._origins, *tasks]
        needed = {task for task in tasks if task.shown}
        # Tasks come after the tasks that they need.
        for task in reversed(tasks):
            if task in needed:
                needed.update(task.needs)
        return errors, [task for task in tasks if task in needed]

    def to_copy(self) -> list[CopiedTree]:
        """The planned trees whose builds are copies and do not exist yet."""
        return [copy for copy in self._copied if not copy.build.installed.is_dir()]

    def _broken(
        self,
        applied: Sequence[StepTree],
        slugs: list[str],
        problem: StackError | None,
        step: str | None,
    ) -> list[Result]:
        """Results for the step that does not apply and the steps that it blocks."""
        if problem is None:
            return []
        name = self._release.name
        broken, *blocked = slugs[len(applied) :] or [problem.step or "-"]
        results = [
            Result(
                name,
                broken,
                "apply",
                "failed",
                summary=problem.message,
                detail=tuple(str(problem).splitlines()[1:]),
            )
        ]
        for slug in blocked:
            text = f"{broken} does not apply"
            results.append(Result(name, slug, "apply", "blocked", summary=text))
        # A step before the broken one is not affected.
        return [] if step in {tree.slug for tree in applied} else results

    def _steps(self, series: Series, step: str | None) -> list[Task]:
        tasks: list[Task] = []
        lints: tuple[Task, ...] = ()
        types = steps_are_typed(self._project, series)
        for after in series.steps:
            before, slug = after.parent, after.slug
            if step not in (None, slug):
                continue
            # mypy reuses what it left for the step before. Its first run takes longest
            # of all, so it starts first.
            lint = self._lint_task(slug, before, after, types, lints)
            lints = (lint,) if types else ()
            tasks.append(lint)
            for tree in (before, after):
                if tree.index not in self._build_tasks:
                    tasks.append(self._build_task(tree))
            first = self._build_tasks[before.index]
            second = self._build_tasks[after.index]
            tasks.append(self._test_task(after.step, before, after, first, second))
        return tasks

    def _types_of_tip(self, series: Series) -> list[Task]:
        """The lint of the whole series with mypy, unless a step's lint is just that."""
        if len(series.steps) < 2:
            return []
        return [self._lint_task("tip", series.base, series.tip, True)]

    def _tip(self, series: Series, step: str | None) -> list[Task]:
        base, tip = series.base, series.tip
        built = self._build_task(tip, "tip")
        tasks = [built]
        if step is None:
            tasks.append(self._lint_task("tip", base, tip, True))
        for tree in series.steps:
            if step in (None, tree.slug):
                tasks.append(self._test_task(tree.step, None, tip, None, built))
        return tasks

    def _build_task(self, tree: Tree, name: str | None = None) -> Task:
        label = name or tree.label
        version = build_version(tree, self._last)
        origin = origin_of(self._store.git, tree, version)
        if origin is not None and origin.index not in self._build_tasks:
            # The tree copies this build, which nobody asked for.
            self._origins.append(self._build_task(origin))

        planned = expected_build(self._cache, self._store, tree, version)

        def work() -> Result:
            result = planned if found(planned) else self._build(tree)
            self._builds[tree.index] = result
            return Result(
                self._release.name,
                label,
                "build",
                "passed",
                result.seconds,
                result.cached,
                result.version,
            )

        needs = () if origin is None else (self._build_tasks[origin.index],)
        task = Task(self._release.name, label, "build", work, needs)
        self._build_tasks[tree.index] = task
        if origin is not None:
            self._copied.append(CopiedTree(tree, planned, task))
        return task

    def _build(self, tree: Tree) -> Build:
        """The tree's build, verified, or made anew if it is absent or damaged."""
        return build(
            self._runner,
            self._cache,
            self._store,
            tree,
            build_version(tree, self._last),
        )

    def _lint_task(
        self,
        label: str,
        before: Tree,
        after: Tree,
        types: bool,
        previous: tuple[Task, ...] = (),
    ) -> Task:
        def work() -> Result:
            key = lint_key(before, after, types=types)
            typed = lint_key(before, after, types=True)
            # What mypy passed, too, passed without it.
            if not types and (known := self._stored(label, "lint", typed)):
                self._cache.results_put(key, msgspec.to_builtins(known))
                return known

            def compute() -> Result:
                lint = self._linter.lint(before, after, types=types)
                lines = tuple(str(finding) for finding in lint.new)
                return Result(
                    self._release.name,
                    label,
                    "lint",
                    "failed" if lint.new else "passed",
                    lint.seconds,
                    summary=lint.summary,
                    detail=lines[:_FINDINGS_SHOWN],
                    notes=lint.notes,
                    typed=lint.typed,
                )

            return self._cached(label, "lint", key, compute)

        return Task(self._release.name, label, "lint", work, after=previous)

    def _test_task(
        self,
        step: Step,
        before: Tree | None,
        after: Tree,
        first: Task | None,
        second: Task,
    ) -> Task:
        def work() -> Result:
            old = self._builds[before.index] if before is not None else None
            new = self._builds[after.index]
            test = StepTest.of(self._support, self._release, step, old, new)
            if known := self._stored(step.slug, "test", test.key):
                return known
            test = test.now()

            def compute() -> Result:
                # A build of an earlier run is verified before it is used.
                for tree in (before, after):
                    if tree is not None:
                        self._build(tree)
                report = test.run(self._server, self._cache)
                return test_result(
                    self._release.name, step.slug, report, before is None
                )

            return self._cached(step.slug, "test", test.key, compute)

        needs = (second,) if first is None else (first, second)
        return Task(self._release.name, step.slug, "test", work, needs)

    def _stored(self, step: str, kind: Kind, key: str) -> Result | None:
        stored = self._cache.results_get(key)
        result = stored_pass(stored, kind, self._release.name, step)
        return result and msgspec.structs.replace(result, cached=True)

    def _cached(
        self, step: str, kind: Kind, key: str, compute: Callable[[], Result]
    ) -> Result:
        """A stored pass, or a new result. Failures are not stored, so a second run
        checks again."""
        if known := self._stored(step, kind, key):
            return known
        result = compute()
        if result.status == "passed":
            self._cache.results_put(key, msgspec.to_builtins(result))
        return result
