# SPDX-License-Identifier: Apache-2.0
"""`xpustack refresh`: carry a series over to another release."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.core.cache import atomic_file
from xpustack.core.errors import ApplyError
from xpustack.core.project import Project
from xpustack.refresh.refresh import refresh as carry_over
from xpustack.refresh.report import conflicts, markdown, rows, summary, to_json
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)


def refresh(
    release: Annotated[str, typer.Argument(help="Where to, such as v0.24.0.")],
    source: Annotated[str, typer.Option("--from", help="Where from, such as v0.23.0.")],
    to: Annotated[
        Path | None,
        typer.Option(help="The work repository: new, or that of an earlier run."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="A step not to carry; repeatable.")
    ] = None,
    tests: Annotated[
        bool, typer.Option("--tests", help="Judge by tests what is obsolete.")
    ] = False,
    test: Annotated[
        list[str] | None,
        typer.Option(help="A step to judge so, if not all; repeatable."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Pin the release, write its series.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write the report there as Markdown.")
    ] = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Carry a series over to another release, and report step by step.

    A step that conflicts is left in the work repository as a cherry-pick in
    progress (exit code 4): resolve it, continue the cherry-pick, and run the same
    command again. Nothing else is written until every step is carried or dropped."""
    with answering("refresh", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            refreshed = carry_over(
                Project.find(),
                cache,
                release,
                source,
                directory=to,
                drop=tuple(drop or ()),
                tests=tests,
                test=tuple(test or ()),
                write=write,
                offline=offline,
                progress=progress,
            )
        if report is not None:
            with atomic_file(report) as file:
                file.write(markdown(refreshed).encode())
        answer.data = to_json(refreshed)
        answer.table(rows(refreshed), ("step", "outcome", "why"))
        answer.say(*conflicts(refreshed), summary(refreshed))
        answer.say(*(f"{stale.kind} {stale.path}" for stale in refreshed.stale or ()))
        if refreshed.stale is not None:
            answer.say(
                f"next: xpustack status --write-readme; xpustack check {release}"
            )
        if refreshed.open:
            answer.say(f"next: {_advice(refreshed.directory)}")
            answer.exit_code = ApplyError.exit_code


def _advice(directory: Path | None) -> str:
    """What to do about a conflict."""
    if directory is None:
        return "the same command with --to DIR leaves the conflict there"
    return (
        f"resolve it in {directory}, git add, git cherry-pick --continue, then the"
        " same command again"
    )
