# SPDX-License-Identifier: Apache-2.0
"""`xpustack export`: a series as pull requests."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.base import releases
from xpustack.core.project import Project
from xpustack.export.export import ASSISTANT
from xpustack.export.export import export as write_export
from xpustack.export.upstream_trees import Person
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)


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
    with answering("export", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            project = Project.find()
            pinned = releases.load(project)[release]
            exported = write_export(
                project,
                cache,
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
                "step": request.step.slug,
                "branch": request.branch,
                "needs": ", ".join(request.needs) or "-",
                "lines": request.lines,
            }
            for request in exported.requests
        ]
        answer.data = {
            "release": pinned.name,
            "directory": str(exported.directory),
            "number": exported.state.number,
            "changed": exported.changed,
            "requests": rows,
        }
        answer.table(rows, ("step", "branch", "needs", "lines"))
        word = "written to" if exported.changed else "unchanged in"
        answer.say(f"export {exported.state.number} {word} {exported.directory}")
