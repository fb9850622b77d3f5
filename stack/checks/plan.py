# SPDX-License-Identifier: Apache-2.0
"""The checks of one release as tasks."""

from collections.abc import Collection
from functools import partial
from itertools import islice
from pathlib import Path

from stack.base.releases import Release
from stack.builds.build import build_version
from stack.builds.copy import origin_of
from stack.checks.checker import Checker
from stack.checks.schedule import Task
from stack.core.errors import SeriesError, SourceError, StackError
from stack.lint.linter import steps_are_typed
from stack.series.apply import trees_before_failure
from stack.series.order import read_order, require_step
from stack.series.result import COPIED, Kind, Result
from stack.series.tree import PLUGIN_HOME, Series, StepTree, Tree


class Planner:
    """Turns one release into tasks. A task comes after those that it needs.

    Args:
        tested: of a quick run, the patches that have a test in its plan: a whole series
            tests only others, and where it is linted, no single step is typed.

    Attributes:
        tasks: what is planned; that of a step which does not apply has its result.
        comparisons: for each tree whose build will be a copy, and does not exist yet,
            the task that compares it with a real build; by the build's key.
    """

    def __init__(
        self,
        checker: Checker,
        release: Release,
        kinds: Collection[Kind],
        tested: set[Path] | None = None,
    ) -> None:
        self._checker, self._release, self._kinds = checker, release, kinds
        self._tested = tested
        self._slugs: list[str] = []
        self._builds: dict[int, Task] = {}
        self.tasks: list[Task] = []
        self.comparisons: dict[str, Task] = {}

    def plan(self, step: str | None, tip: bool) -> None:
        """Plan the checks of one step, or of all; on the tip alone if `tip`.

        Raises:
            UsageError: the release has no such step.
        """
        project, store = self._checker.project, self._checker.store
        if step is not None:
            slugs = read_order(project, self._release.name)
            require_step(slugs, step, self._release.name)
        try:
            series = trees_before_failure(store, project, self._release)
        except (SourceError, SeriesError) as error:
            self._broken([], error)
            return
        self._slugs = read_order(project, self._release.name)
        applied = [tree.slug for tree in series.steps]
        # A step before the broken one is not affected, unless the tip is asked for.
        if tip or step not in applied:
            self._broken(self._slugs[len(applied) :], series.problem)
        whole = len(applied) == len(self._slugs)
        if tip and whole:
            self._tip(series, step)
        elif not tip:
            # Of a single step that is the step's lint.
            lint_tip = whole and step is None and len(applied) > 1
            quick = lint_tip and self._tested is not None
            types = steps_are_typed(self._checker.project, series)
            self._steps(series, step, types and not quick)
            if lint_tip:
                self._lint("tip", series.base, series.tip, True)

    @property
    def first_build(self) -> tuple[Task, ...]:
        """The first build of the release, if one is planned."""
        return tuple(islice(self._builds.values(), 1))

    def _broken(self, slugs: list[str], problem: StackError | None) -> None:
        """Results for the step that does not apply and the steps that it blocks."""
        if problem is None:
            return
        broken, *blocked = slugs or [problem.step or "-"]
        result = Result(
            self._release.name,
            broken,
            "apply",
            "failed",
            summary=problem.message,
            detail=tuple(str(problem).splitlines()[1:]),
            sourceless=isinstance(problem, SourceError),
        )
        self.tasks.append(Task.ended(result))
        for slug in blocked:
            text = f"{broken} does not apply"
            result = Result(self._release.name, slug, "apply", "blocked", summary=text)
            self.tasks.append(Task.ended(result))

    def _steps(self, series: Series, step: str | None, types: bool) -> None:
        for after in series.steps:
            if step in (None, after.slug):
                # The tip, or a single step, gets mypy itself.
                daemon = types and step is None and len(series.steps) > 1
                self._lint(after.slug, after.parent, after, types, daemon)
                for tree in (after.parent, after):
                    self._build(tree, tree.label)
                self._test(after, after.parent, after)

    def _tip(self, series: Series, step: str | None) -> None:
        self._build(series.tip, "tip")
        if step is None:
            self._lint("tip", series.base, series.tip, True)
        for tree in series.steps:
            known = self._tested is not None and tree.step.path in self._tested
            # What the plugin checks differs between releases that share its patch.
            known = known and not any(PLUGIN_HOME in path for path in tree.added)
            if step in (None, tree.slug) and not known:
                self._test(tree, None, series.tip)

    def _build(self, tree: Tree, label: str) -> None:
        """Plan the build of a tree, if that, or a test of it, is wanted. A real build
        needs the server, which starts while the rest is planned."""
        if tree.index in self._builds or self._kinds == {"lint"}:
            return
        last = len(self._slugs)
        origin = origin_of(self._checker.store.git, tree, build_version(tree, last))
        work = partial(self._checker.built, tree, last, label)
        earlier = self._builds.get(origin.index) if origin is not None else None
        needs = () if earlier is None else (earlier,)
        # What is really built shares the byte code of a build that is there.
        first = () if needs else self.first_build
        shown = "build" in self._kinds
        task = Task(self._release.name, label, "build", work, needs, first, shown=shown)
        self._builds[tree.index] = task
        self.tasks.append(task)
        planned = self._checker.planned(tree, last)
        if planned.installed.is_dir():
            return
        if origin is None:
            self._checker.server.start()
        else:
            compare = partial(self._checker.compared, tree, planned, label)
            self.comparisons[planned.key] = Task(
                self._release.name, COPIED, "build", compare, (task,)
            )

    def _lint(
        self, label: str, before: Tree, after: Tree, types: bool, daemon: bool = False
    ) -> None:
        if "lint" in self._kinds:
            lint = partial(self._checker.lint, types=types, daemon=daemon)
            work = partial(lint, label, before, after)
            self.tasks.append(Task(self._release.name, label, "lint", work))

    def _test(self, tree: StepTree, before: Tree | None, after: Tree) -> None:
        """Plan the test of the step of `tree`."""
        if self._tested is not None:
            self._tested.add(tree.step.path)
        if "test" in self._kinds:
            last = len(self._slugs)
            work = partial(self._checker.test, tree.step, before, after, last)
            needed = (after,) if before is None else (before, after)
            needs = tuple(self._builds[each.index] for each in needed)
            task = Task(self._release.name, tree.slug, "test", work, needs)
            self.tasks.append(task)
