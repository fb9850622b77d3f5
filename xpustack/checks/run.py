# SPDX-License-Identifier: Apache-2.0
"""Builds, lints and tests the trees in parallel, and skips what has a stored pass."""

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.builds.equality import next_to_prove, prove_equal
from xpustack.checks.observer import Check, NoObserver, Observer
from xpustack.checks.plan import DerivedTree, Planner
from xpustack.checks.results import DERIVED, Kind, Report, Result
from xpustack.checks.schedule import Task, execute
from xpustack.core.cache import Cache
from xpustack.core.process import Runner
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.lint.linter import Linter
from xpustack.series.static import check_static
from xpustack.steptest.material import Support
from xpustack.steptest.server import Server


def run(
    project: Project,
    cache: Cache,
    releases: Iterable[Release],
    *,
    step: str | None = None,
    only: Kind | None = None,
    tips: Collection[str] = (),
    jobs: int = 2,
    offline: bool = False,
    progress: Progress = silent,
    observer: Observer | None = None,
) -> Report:
    """Check the releases' steps; a broken one never stops the others.

    Args:
        step: the slug of the one step to check; None for all.
        only: the one kind of check; builds that tests need run nevertheless.
        tips: names of the releases whose whole series is checked at once: one
            build, one lint against the base, every step's test on that tree alone.
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
    runner = Runner()
    server = Server(runner)
    linter = Linter(runner, cache, Store(cache))
    support = Support.of(project)
    results = _static(project, chosen, step)
    cache.sweep()
    tasks: list[Task] = []
    derived: list[DerivedTree] = []
    # The newest release first: its lints, one after the other, take longest.
    for release in reversed(chosen):
        planner = Planner(
            support,
            cache,
            Store(cache),
            release,
            runner,
            server,
            linter,
            progress,
        )
        errors, planned = planner.plan(step, only, release.name in tips, offline)
        results += errors
        tasks += planned
        derived += planner.to_derive()
    if step is None and only in (None, "build") and derived:
        _add_proof(tasks, derived, cache, runner)
    observer = observer or NoObserver()
    checks = [Check(result.release, result.step, result.kind) for result in results]
    observer.planned([*checks, *(task.check for task in tasks)])
    for check, result in zip(checks, results, strict=True):
        observer.finished(check, result)
    with closing(server), closing(linter):
        problem = execute(tasks, runner, jobs, observer)
    results += [
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
        )
        for finding in check_static(project)
        if not finding.warning
        and (finding.release is None or finding.release in names)
        and step in (None, finding.step)
    ]


def _add_proof(
    tasks: list[Task], derived: Sequence[DerivedTree], cache: Cache, runner: Runner
) -> None:
    """Add the comparison of one tree that this run derives with a real build of it."""
    pairs = [(derivation.tree, derivation.build) for derivation in derived]
    tree, build = next_to_prove(cache, pairs)
    need = next(derivation.task for derivation in derived if derivation.tree is tree)

    def work() -> Result:
        equal = prove_equal(runner, cache, Store(cache), tree, build)
        return Result(
            tree.release.name,
            DERIVED,
            "build",
            "passed",
            equal.seconds,
            summary=f"{need.step}: {equal.members} members as a real build has them",
        )

    proof = Task(tree.release.name, DERIVED, "build", work, needs=(need,))
    tasks.insert(tasks.index(need) + 1, proof)
