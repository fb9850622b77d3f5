# SPDX-License-Identifier: Apache-2.0
"""`xpustack check`."""

from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from xpustack.base import releases
from xpustack.checks import run as checks
from xpustack.checks.results import Kind
from xpustack.core import cpus
from xpustack.core.errors import CheckFailed, SeriesError
from xpustack.core.project import Project
from xpustack.series import static
from xpustack.series.order import read_order, require_step
from xpustack.series.static import SeriesProblem
from xpustack.terminal import report
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_checks,
    stdout_console,
    using_cache,
)


class Only(StrEnum):
    """The kinds of check that can be asked for alone."""

    build = "build"
    lint = "lint"
    test = "test"


_KINDS: dict[Only, Kind] = {
    Only.build: "build",
    Only.lint: "lint",
    Only.test: "test",
}


def check(
    release: Annotated[str | None, typer.Argument(help="Such as v0.22.1.")] = None,
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
        bool, typer.Option("--static", help="Judge the files alone: no checkout.")
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
        bool, typer.Option("-v", "--verbose", help="A row of the table for each step.")
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
            answer.data = [msgspec.to_builtins(finding) for finding in findings]
            errors = sum(not finding.warning for finding in findings)
            answer.say(*map(str, findings), f"static: {errors} errors")
            answer.exit_code = SeriesError.exit_code if errors else 0
            return
        pinned = releases.load(project)
        chosen = list(pinned) if release is None else [pinned[release]]
        names = [release.name for release in chosen]
        whole = names if tip else [name for name in names if name != pinned.names[-1]]
        jobs = jobs or cpus.usable()
        with using_cache() as cache, showing_checks(cache, jobs) as display:
            done = checks.run(
                project,
                cache,
                chosen,
                step=step,
                only=_KINDS[only] if only else None,
                tips=whole if tip or quick else (),
                jobs=jobs,
                offline=offline,
                progress=display.message,
                observer=display,
            )
        answer.data = done.to_json()
        if done.problem is not None:
            answer.fail(done.problem)
        elif done.failed:
            answer.exit_code = CheckFailed.exit_code
        if not as_json:
            report.show(done, stdout_console(100), verbose)


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
