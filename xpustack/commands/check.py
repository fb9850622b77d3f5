# SPDX-License-Identifier: Apache-2.0
"""`xpustack check`: rebuild, lint and test steps, or judge their files."""

from typing import Annotated, Literal

from cyclopts import Parameter

from stack.base import releases
from stack.checks import run as checks
from stack.core.errors import SeriesError, StackError
from stack.core.process import usable_cpus
from stack.core.project import Project
from stack.series import static
from stack.series.order import read_order, require_step
from stack.series.static import Advice
from stack.terminal.console import (
    Count,
    Offline,
    Reply,
    showing_checks,
    stdout_console,
    using_cache,
)
from stack.terminal.report import show

Only = Literal["build", "lint", "test"]
"""The kinds of check that can be asked for alone."""


def check(
    release: str | None = None,
    step: str | None = None,
    /,
    *,
    jobs: Annotated[Count | None, Parameter(("--jobs", "-j"))] = None,
    only: Only | None = None,
    only_static: Annotated[bool, Parameter("--static")] = False,
    tip: bool = False,
    quick: bool = False,
    verbose: Annotated[bool, Parameter(("--verbose", "-v"))] = False,
    offline: Offline = False,
    answer: Reply,
) -> None:
    """Rebuild, lint and test every step of every release, or what is named.

    The last line is `N passed, N failed`. If the machine fails (a full disk, a
    cache that cannot be written), the run ends early with exit code 5.

    Args:
        release: Such as v0.22.1.
        step: A step's slug.
        jobs: How many checks run at the same time; by default one more than the CPUs
            that this process may use, for tests of steps that follow each other wait
            for the same imports.
        only: One kind of check.
        only_static: Check the stack's own files alone.
        tip: Check whole series, not each step.
        quick: Check each step of the newest release, and of the others whole series,
            with the tests of patches that no newer release has; types of whole series
            alone.
        verbose: Show a row for each step.
    """
    project = Project.find()
    if only_static:
        findings = _static(project, release, step)
        answer.data = [finding.to_json() for finding in findings]
        errors = [each for each in findings if not isinstance(each, Advice)]
        for finding in findings:
            answer.say(f"{'error' if finding in errors else 'warning'}: {finding}")
        if not errors and release is None:
            answer.say(*(f"note: {note}" for note in static.unrecorded(project)))
        answer.say(f"static: {len(errors)} errors")
        answer.exit_code = SeriesError.exit_code if errors else 0
        return
    pinned = releases.load(project)
    chosen = list(pinned) if release is None else [pinned[release]]
    tips = [
        release.name
        for release in chosen
        if tip or (quick and release.name != pinned.newest.name)
    ]
    jobs = jobs or usable_cpus() + 1
    with (
        showing_checks() as display,
        using_cache(offline, display.message) as cache,
    ):
        report = checks.run(
            project,
            cache,
            chosen,
            step=step,
            only=only,
            tips=tips,
            quick=quick,
            jobs=jobs,
            observer=display,
        )
    answer.data = report.to_json()
    if report.problem is not None:
        answer.fail(report.problem)
    else:
        answer.exit_code = report.exit_code
    if not answer.as_json:
        show(report, stdout_console(100), verbose)


def _static(
    project: Project, release: str | None, step: str | None
) -> list[StackError]:
    """The findings about one release or all, and of those about one step or all.

    Raises:
        UsageError: there is no such release, or it has no such step.
    """
    if release is not None:
        release = releases.load(project)[release].name
        if step is not None:
            require_step(read_order(project, release), step, release)
    return [
        finding
        for finding in static.check_static(project)
        if (release is None or finding.release in (None, release))
        and (step is None or finding.step in (None, step))
    ]
