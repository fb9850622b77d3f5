# SPDX-License-Identifier: Apache-2.0
"""`xpustack check`: rebuild, lint and test steps, or judge their files."""

from typing import Annotated, Literal

import typer

from xpustack.base import releases
from xpustack.checks import run as checks
from xpustack.core.errors import SeriesError
from xpustack.core.process import usable_cpus
from xpustack.core.project import Project
from xpustack.series import static
from xpustack.series.order import read_order, require_step
from xpustack.series.static import SeriesProblem
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_checks,
    stdout_console,
    using_cache,
)
from xpustack.terminal.report import show
from xpustack.terminal.selection import ReleaseName

Only = Literal["build", "lint", "test"]
"""The kinds of check that can be asked for alone."""


def check(
    release: ReleaseName = None,
    step: Annotated[str | None, typer.Argument(help="A step's slug.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "-j",
            "--jobs",
            min=1,
            show_default="the CPUs that this process may use",
            help="How many checks run at the same time.",
        ),
    ] = None,
    only: Annotated[Only | None, typer.Option(help="One kind of check.")] = None,
    only_static: Annotated[
        bool, typer.Option("--static", help="Check the stack's own files alone.")
    ] = False,
    tip: Annotated[
        bool, typer.Option("--tip", help="Check whole series, not each step.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Check whole series, but each step of the newest release.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show a row for each step.")
    ] = False,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild, lint and test every step of every release, or what is named.

    The last line is `N passed, N failed`. If the machine fails (a full disk, a
    cache that cannot be written), the run ends early with exit code 5."""
    with answering("check", as_json) as answer:
        project = Project.find()
        if only_static:
            findings = _static(project, release, step)
            answer.data = findings
            errors = sum(not finding.warning for finding in findings)
            answer.say(*map(str, findings))
            if not errors and release is None:
                answer.say(*(f"note: {note}" for note in static.unrecorded(project)))
            answer.say(f"static: {errors} errors")
            answer.exit_code = SeriesError.exit_code if errors else 0
            return
        pinned = releases.load(project)
        chosen = list(pinned) if release is None else [pinned[release]]
        tips = [
            release.name
            for release in chosen
            if tip or (quick and release.name != pinned.newest.name)
        ]
        jobs = jobs or usable_cpus()
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
                jobs=jobs,
                observer=display,
            )
        answer.data = report.to_json()
        if report.problem is not None:
            answer.fail(report.problem)
        else:
            answer.exit_code = report.exit_code
        if not as_json:
            show(report, stdout_console(100), verbose)


def _static(
    project: Project, release: str | None, step: str | None
) -> list[SeriesProblem]:
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
