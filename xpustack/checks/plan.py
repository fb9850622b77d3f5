# SPDX-License-Identifier: Apache-2.0
"""The checks of one release as tasks."""

from collections.abc import Sequence
from dataclasses import dataclass

from xpustack.base.releases import Release
from xpustack.builds.build import build_version
from xpustack.builds.copy import origin_of
from xpustack.builds.installed import Build
from xpustack.checks.checker import Checker
from xpustack.checks.results import Kind, Result
from xpustack.checks.schedule import Task
from xpustack.core.errors import EnvironmentProblem, SourceError, StackError
from xpustack.lint.linter import steps_are_typed
from xpustack.series.apply import trees_before_failure
from xpustack.series.order import read_order, require_step
from xpustack.series.tree import Series, StepTree, Tree


@dataclass(frozen=True)
class CopiedTree:
    """A tree whose build this run copies from another tree's, and its task."""

    tree: Tree
    build: Build
    task: Task


class Planner:
    """Turns one release into tasks.

    Attributes:
        last: how many steps the series has.
        copied: the planned trees whose builds are copies and do not exist yet.
    """

    def __init__(self, checker: Checker, release: Release) -> None:
        self._checker, self._release = checker, release
        self._builds: dict[int, Task] = {}
        self._origins: list[Task] = []
        self.copied: list[CopiedTree] = []
        self.last = 0

    def plan(
        self, step: str | None, only: Kind | None, tip: bool
    ) -> tuple[list[Result], list[Task]]:
        project = self._checker.project
        if step is not None:
            slugs = read_order(project, self._release.name)
            require_step(slugs, step, self._release.name)
        series, problem = trees_before_failure(
            self._checker.store, project, self._release
        )
        if isinstance(problem, EnvironmentProblem):
            raise problem
        if series is None:
            return self._broken((), [], problem, step), []
        slugs = read_order(project, self._release.name)
        self.last = len(slugs)
        errors = self._broken(series.steps, slugs, problem, step)
        whole = len(series.steps) == self.last
        if tip:
            tasks = self._tip(series, step) if whole else []
        else:
            tasks = self._steps(series, step)
            if whole and step is None and len(series.steps) > 1:
                # Else a step's lint is just that.
                tasks.append(self._lint("tip", series.base, series.tip, True))
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
                sourceless=isinstance(problem, SourceError),
            )
        ]
        for slug in blocked:
            text = f"{broken} does not apply"
            results.append(Result(name, slug, "apply", "blocked", summary=text))
        # A step before the broken one is not affected.
        return [] if step in {tree.slug for tree in applied} else results

    def _steps(self, series: Series, step: str | None) -> list[Task]:
        tasks: list[Task] = []
        types = steps_are_typed(self._checker.project, series)
        for after in series.steps:
            before, slug = after.parent, after.slug
            if step not in (None, slug):
                continue
            tasks.append(self._lint(slug, before, after, types))
            for tree in (before, after):
                if tree.index not in self._builds:
                    tasks.append(self._build(tree, tree.label))
            tasks.append(self._test(after, before, after))
        return tasks

    def _tip(self, series: Series, step: str | None) -> list[Task]:
        base, tip = series.base, series.tip
        tasks = [self._build(tip, "tip")]
        if step is None:
            tasks.append(self._lint("tip", base, tip, True))
        for tree in series.steps:
            if step in (None, tree.slug):
                tasks.append(self._test(tree, None, tip))
        return tasks

    def _build(self, tree: Tree, label: str) -> Task:
        version = build_version(tree, self.last)
        origin = origin_of(self._checker.store.git, tree, version)
        if origin is not None and origin.index not in self._builds:
            # The tree copies this build, which nobody asked for.
            self._origins.append(self._build(origin, origin.label))

        def work() -> Result:
            return self._checker.built(tree, self.last, label)

        needs = () if origin is None else (self._builds[origin.index],)
        task = Task(self._release.name, label, "build", work, needs)
        self._builds[tree.index] = task
        planned = self._checker.planned(tree, self.last)
        if origin is not None and not planned.installed.is_dir():
            self.copied.append(CopiedTree(tree, planned, task))
        return task

    def _lint(self, label: str, before: Tree, after: Tree, types: bool) -> Task:
        def work() -> Result:
            return self._checker.lint(label, before, after, types=types)

        return Task(self._release.name, label, "lint", work)

    def _test(self, tree: StepTree, before: Tree | None, after: Tree) -> Task:
        """The test of the step of `tree`."""

        def work() -> Result:
            return self._checker.test(tree.step, before, after, self.last)

        needed = (after,) if before is None else (before, after)
        needs = tuple(self._builds[each.index] for each in needed)
        return Task(self._release.name, tree.slug, "test", work, needs)
