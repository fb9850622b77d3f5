# SPDX-License-Identifier: Apache-2.0
"""`xpustack status`."""

from typing import Annotated

import msgspec
import typer

from xpustack.base import releases
from xpustack.core.project import Project
from xpustack.pages import status as core
from xpustack.pages.status import Entry
from xpustack.terminal.console import AsJson, answering, using_cache


def status(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option(help="As a Markdown table.")] = False,
    write_readme: Annotated[
        bool, typer.Option(help="Refresh README.md's section and docs/steps.md.")
    ] = False,
    check_readme: Annotated[
        bool, typer.Option(help="Fail if one of them is stale.")
    ] = False,
) -> None:
    """Show release by step: lines changed, upstream's status, cached checks of
    the step as it is now, and days since it was committed first.

    The README's table and --markdown leave out what depends on machine and day."""
    with answering("status", as_json) as answer, using_cache() as cache:
        project = Project.find()
        pinned = releases.load(project)
        if check_readme:
            core.require_fresh(project, pinned)
        elif write_readme:
            core.write_readme(project, pinned)
        elif markdown:
            entries = core.entries(project, pinned)
            answer.data = msgspec.to_builtins(entries)
            answer.say(core.markdown(entries, pinned.names).removesuffix("\n"))
        else:
            entries = core.judged(project, cache, pinned)
            answer.data = msgspec.to_builtins(entries)
            columns = ("step", *pinned.names)
            rows = [
                dict(zip(columns, _row(slug, row), strict=True))
                for slug, row in core.matrix(entries, pinned.names)
            ]
            answer.table(rows, columns)


def _row(slug: str, row: list[Entry | None]) -> list[str]:
    return [slug, *(core.long_cell(entry) if entry else "-" for entry in row)]
