# SPDX-License-Identifier: Apache-2.0
"""`xpustack save`: write commits back as patches."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.core.errors import CheckFailed
from xpustack.core.project import Project
from xpustack.series.save import save as save_series
from xpustack.terminal.console import AsJson, answering, showing_progress, using_cache


def save(
    directory: Annotated[Path, typer.Argument(help="What `apply --to` made.")],
    dry_run: Annotated[
        bool, typer.Option(help="List stale files, write none.")
    ] = False,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="A step that is to leave the series; repeatable."),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option(help="Change this release's steps alone, none of another."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write patches, overlay and trailers back from the commits in DIRECTORY, for all
    releases that share the patches.

    A dry run that finds stale files ends with exit code 1."""
    with answering("save", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            stale = save_series(
                Project.find(),
                cache,
                directory,
                dry_run,
                drop=tuple(drop or ()),
                alone=alone,
                progress=progress,
            )
        lines = [f"{file.kind} {file.path}" for file in stale]
        answer.data = {"stale": lines, "written": not dry_run}
        answer.say(*(lines or ["nothing to save"]))
        if stale and dry_run:
            answer.exit_code = CheckFailed.exit_code
