# SPDX-License-Identifier: Apache-2.0
"""What is to be checked of one release: its trees as tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.builds import bytecode
from xpustack.builds.build import Build, build, build_version, expected_build
from xpustack.builds.derive import origin_of
from xpustack.checks.proof import linted_key
from xpustack.checks.results import Kind, Result, stored_pass
from xpustack.checks.schedule import Task
from xpustack.core.cache import Cache
from xpustack.core.errors import EnvironmentProblem, StackError
from xpustack.core.process import Runner
from xpustack.core.progress import Progress
from xpustack.lint.linter import Linter, touched
from xpustack.series.apply import trees_before_failure
from xpustack.series.order import read_order, require_step
from xpustack.series.patch import Step
from xpustack.series.tree import Series, StepTree, Tree
from xpustack.steptest.server import Server
from xpustack.steptest.step_test import StepTest, Support, Tested

_SHOWN = 20


@dataclass(frozen=True)
class Derived:
    """A tree that this run derives from another one, and the task that does it."""

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
        progress: Progress,
    ) -> None:
        self._support, self._project = support, support.project
        self._cache, self._store = cache, store
        self._release, self._runner, self._progress = release, runner, progress
        self._server, self._linter = server, linter
        self._builds: dict[int, Build] = {}
        self._build_tasks: dict[int, Task] = {}
        self._origins: list[Task] = []
        self._derived: list[Derived] = []
        self._last = 0
        self._later: tuple[str, ...] = ()

    def plan(
        self, step: str | None, only: Kind | None, tip: bool, offline: bool
    ) -> tuple[list[Result], list[Task]]:
        if step is not None:
            slugs = read_order(self._project, self._release.name)
            require_step(slugs, step, self._release.name)
        series, problem = trees_before_failure(
            self._store,
            self._project,
            self._release,
            offline=offline,
            progress=self._progress,
        )
        if isinstance(problem, EnvironmentProblem):
            raise problem
        if series is None:
            return self._broken((), [], problem, step), []
        slugs = read_order(self._project, self._release.name)
        self._last = len(slugs)
        errors = self._broken(series.steps, slugs, problem, step)
        whole = len(series.steps) == self._last
        if not tip and step is None:
            self._later = touched(series.base, series.tip)
        if tip:
            tasks = self._tip(series, step) if whole else []
        else:
            tasks = self._steps(series, step)
        kinds = {only} if only else {"build", "lint", "test"}
        for task in tasks:
            task.shown = task.kind in kinds
        for task in self._origins:
            task.shown = False
        tasks = [*self._origins, *tasks]
        needed = {task for task in tasks if task.shown}
        # What a task needs comes before it.
        for task in reversed(tasks):
            if task in needed:
                needed.update(task.needs)
        return errors, [task for task in tasks if task in needed]

    def to_derive(self) -> list[Derived]:
        """The trees of the plan that are to be derived, and are not yet there."""
        return [each for each in self._derived if not each.build.installed.is_dir()]

    def _broken(
        self,
        made: Sequence[StepTree],
        slugs: list[str],
        problem: StackError | None,
        step: str | None,
    ) -> list[Result]:
        """The step at which the series stops, and those that it takes along."""
        if problem is None:
            return []
        name = self._release.name
        at, *rest = slugs[len(made) :] or [problem.step or "-"]
        results = [
            Result(
                name,
                at,
                "apply",
                "failed",
                summary=problem.message,
                detail=tuple(str(problem).splitlines()[1:]),
            )
        ]
        for slug in rest:
            text = f"{at} does not apply"
            results.append(Result(name, slug, "apply", "blocked", summary=text))
        # A step before the break is not concerned by it.
        done = {tree.slug for tree in made}
        return [] if step in done else results

    def _steps(self, series: Series, step: str | None) -> list[Task]:
        tasks: list[Task] = []
        lints: tuple[Task, ...] = ()
        for after in series.steps:
            before, slug = after.parent, after.slug
            if step not in (None, slug):
                continue
            # A release's lints follow each other: each goes on from what the one
            # before left. The first one takes longest of all, so it starts first.
            lint = self._lint_task(slug, before, after, lints)
            lints = (lint,)
            tasks.append(lint)
            for tree in (before, after):
                if tree.index not in self._build_tasks:
                    tasks.append(self._build_task(tree))
            first = self._build_tasks[before.index]
            second = self._build_tasks[after.index]
            tasks.append(self._test_task(after.step, before, after, first, second))
        return tasks

    def _tip(self, series: Series, step: str | None) -> list[Task]:
        base, tip = series.base, series.tip
        built = self._build_task(tip, "tip")
        tasks = [built]
        if step is None:
            tasks.append(self._lint_task("tip", base, tip, ()))
        for tree in series.steps:
            if step in (None, tree.slug):
                tasks.append(self._test_task(tree.step, None, tip, None, built))
        return tasks

    def _build_task(self, tree: Tree, name: str | None = None) -> Task:
        label = name or tree.label
        version = build_version(tree, self._last)
        origin = origin_of(self._store.git, tree, version)
        if origin is not None and origin.index not in self._build_tasks:
            # Nobody asked for it, but the tree is derived from it.
            self._origins.append(self._build_task(origin))

        def work() -> Result:
            made = build(
                self._runner,
                self._cache,
                self._store,
                tree,
                version,
                progress=self._progress,
            )
            self._builds[tree.index] = made
            return Result(
                self._release.name,
                label,
                "build",
                "passed",
                made.seconds,
                made.cached,
                made.version,
            )

        needs = () if origin is None else (self._build_tasks[origin.index],)
        task = Task(self._release.name, label, "build", work, needs)
        self._build_tasks[tree.index] = task
        if origin is not None:
            planned = expected_build(self._cache, self._store, tree, version)
            self._derived.append(Derived(tree, planned, task))
        return task

    def _lint_task(
        self, label: str, before: Tree, after: Tree, previous: tuple[Task, ...]
    ) -> Task:
        def work() -> Result:
            key = linted_key(before, after)

            def compute() -> Result:
                found = self._linter.lint(before, after, later=self._later)
                lines = tuple(str(finding) for finding in found.new)
                return Result(
                    self._release.name,
                    label,
                    "lint",
                    "failed" if found.new else "passed",
                    found.seconds,
                    summary=f"{len(found.new)} new, {found.old} of the base;"
                    f" {', '.join(found.tools) or 'no file to lint'}",
                    detail=lines[:_SHOWN],
                    notes=found.notes,
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

            trees = [tree for tree in (old, new) if tree is not None]

            def compute() -> Result:
                for tree in trees:
                    bytecode.provide(self._cache, tree)
                done = test.run(self._server, self._cache)
                for tree in trees:
                    bytecode.collect(self._cache, tree)
                return _test_result(self._release.name, step, done, before is None)

            return self._cached(step.slug, "test", test.key, compute)

        needs = (second,) if first is None else (first, second)
        return Task(self._release.name, step.slug, "test", work, needs)

    def _cached(
        self, step: str, kind: Kind, key: str, compute: Callable[[], Result]
    ) -> Result:
        """A stored pass, or a new result. A failure is never stored, so that a
        second run looks again."""
        known = self._cache.results_get(key)
        result = stored_pass(known, kind, self._release.name, step)
        if result is not None:
            return msgspec.structs.replace(result, cached=True)
        result = compute()
        if result.status == "passed":
            self._cache.results_put(key, msgspec.to_builtins(result))
        return result


def _test_result(release: str, step: Step, done: Tested, tip: bool) -> Result:
    counts = done.counts
    summary = f"{counts['tests']} tests"
    if not tip:
        summary += f", {counts['failed_before']} fail before"
    if counts["skipped"]:
        summary += f", {counts['skipped']} skipped"
    detail: tuple[str, ...] = ()
    if done.problems:
        detail = (*done.problems, "", *done.output)
    return Result(
        release,
        step.slug,
        "test",
        "failed" if done.problems else "passed",
        done.seconds,
        summary=summary,
        detail=detail,
        notes=(*done.warnings, *(f"skipped: {skip}" for skip in done.skips)),
        tip=tip,
        figures=done.figures,
    )
