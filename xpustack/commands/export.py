# SPDX-License-Identifier: Apache-2.0
"""`xpustack export`."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack import releases
from xpustack.cache import Cache
from xpustack.console import (
    AsJson,
    Offline,
    print_rows,
    reporting_errors,
    showing_progress,
)
from xpustack.export import ASSISTANT
from xpustack.export import export as write_export
from xpustack.project import Project
from xpustack.upstream_trees import Person


def export(
    release: Annotated[str, typer.Argument(help="Such as v0.33.0.")],
    to: Annotated[
        Path | None, typer.Option(help="The folder; default: export/RELEASE.")
    ] = None,
    author: Annotated[
        str | None,
        typer.Option(help="`Name <address>`; default: git's user.name, user.email."),
    ] = None,
    assistant: Annotated[
        str, typer.Option(help="The AI tool that commits name as co-author.")
    ] = ASSISTANT,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Build and test each exported commit.")
    ] = False,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Write a series as pull requests: branches, mails, descriptions, cover.

    Refused (exit code 1) unless every step's checks are green as it is now."""
    with reporting_errors(as_json), showing_progress() as progress:
        project = Project.find()
        pinned = releases.load(project)[release]
        done = write_export(
            project,
            Cache.default(),
            pinned,
            to or project.root / "export" / pinned.name,
            Person.find(project, author),
            assistant=assistant,
            bisect=bisect,
            offline=offline,
            progress=progress,
        )
    rows = [
        {
            "step": one.step.slug,
            "branch": one.branch,
            "needs": ", ".join(one.needs) or "-",
            "lines": one.lines,
        }
        for one in done.requests
    ]
    data = {
        "release": pinned.name,
        "directory": str(done.directory),
        "number": done.made.number,
        "changed": done.changed,
        "requests": rows,
    }
    print_rows(as_json, data, rows, ("step", "branch", "needs", "lines"))
    if not as_json:
        word = "written to" if done.changed else "unchanged in"
        print(f"export {done.made.number} {word} {done.directory}")
