# SPDX-License-Identifier: Apache-2.0
"""Builds, lints and tests the trees in parallel, and skips what has a stored pass."""

import time
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path

from stack.base.releases import Release
from stack.checks.checker import Checker
from stack.checks.plan import Planner
from stack.checks.schedule import Observer, Task, execute
from stack.core.cache import Cache
from stack.core.project import Project
from stack.series.result import KINDS, Kind, Report, Result
from stack.series.static import Advice, check_static

_SILENT = Observer()


def run(
    project: Project,
    cache: Cache,
    releases: Iterable[Release],
    *,
    step: str | None = None,
    only: Kind | None = None,
    tips: Collection[str] = (),
    quick: bool = False,
    jobs: int = 2,
    observer: Observer = _SILENT,
) -> Report:
    """Check the releases' steps; a broken one never stops the others.

    Args:
        step: the slug of the one step to check; None for all.
        only: the one kind of check; builds that tests need run nevertheless.
        tips: names of the releases whose whole series is checked at once: one
            build, one lint against the base, every step's test on that tree alone.
        quick: of the series in `tips`, test each patch on the newest release alone that
            has it; mypy sees no step of a series whose tip is linted, too.
        jobs: how many checks run at the same time.
        observer: gets the events of the run.

    Returns:
        The report; its `problem` says which failure of the machine ended the run early.

    Raises:
        UsageError: a release has no such step.
        EnvironmentProblem: the machine failed before any check could start.
        KeyboardInterrupt: after all child processes were killed.
    """
    begin = time.monotonic()
    chosen = list(releases)
    kinds = {only} if only else set(KINDS)
    tasks = [Task.ended(result) for result in _static(project, chosen, step)]
    cache.sweep()
    comparisons: dict[str, Task] = {}
    first_builds: list[Task] = []
    tested: set[Path] | None = set() if quick else None
    with Checker(project, cache) as checker:
        # The newest release first: its lints take longest, and a quick run tests there
        # what others share.
        for release in reversed(chosen):
            planner = Planner(checker, release, kinds, tested)
            planner.plan(step, release.name in tips)
            tasks += planner.tasks
            comparisons |= planner.comparisons
            first_builds += planner.first_build
        if step is None and "build" in kinds and comparisons:
            # A key is a hash, so that it is another tree when anything changed.
            comparison = comparisons[min(comparisons)]
            tasks.insert(tasks.index(comparison.needs[0]) + 1, comparison)
        # One checked-out tree moves from lint to lint.
        lints = [task for task in tasks if task.kind == "lint"]
        for earlier, later in pairwise(lints):
            later.after = (earlier,)
        # Other releases have most of their byte code from the very first build.
        for later in first_builds[1:]:
            later.after = (first_builds[0],)
        observer.planned(tasks)
        problem = execute(tasks, checker.runner, jobs, observer)
    results = [
        task.result
        for task in tasks
        if task.result is not None and (task.shown or task.result.status == "failed")
    ]
    in_order = _in_order(results, [release.name for release in chosen])
    not_run = sum(task.shown and task.result is None for task in tasks)
    return Report(tuple(in_order), time.monotonic() - begin, problem, not_run)


def _in_order(results: list[Result], releases: list[str]) -> list[Result]:
    """Results by release, step and kind. A release's steps come in the order of their
    builds and tests, because its first lint starts before these."""
    kinds = ("static", "apply", "build", "lint", "test")
    order = {name: index for index, name in enumerate(["-", *releases])}
    steps: dict[tuple[str, str], int] = {}
    for result in sorted(results, key=lambda result: result.kind == "lint"):
        steps.setdefault((result.release, result.step), len(steps))
    return sorted(
        results,
        key=lambda result: (
            order[result.release],
            steps[result.release, result.step],
            kinds.index(result.kind),
        ),
    )


def _static(project: Project, chosen: list[Release], step: str | None) -> list[Result]:
    """What is wrong with the files of the releases or of the one step."""
    names = {release.name for release in chosen}
    return [
        Result(
            finding.release or "-",
            finding.step or "-",
            "static",
            "failed",
            summary=f"{finding.path}: {finding.message}",
            detail=finding.detail,
        )
        for finding in check_static(project)
        if not isinstance(finding, Advice)
        and (finding.release is None or finding.release in names)
        and step in (None, finding.step)
    ]
