# SPDX-License-Identifier: Apache-2.0
"""`xpustack status`: the matrix of releases and steps, and the pages that show it."""

from typing import Annotated

import typer

from xpustack.base import releases
from xpustack.core.project import Project
from xpustack.pages import status as page
from xpustack.pages.overview import overview
from xpustack.terminal.console import AsJson, answering, using_cache


def status(
    as_json: AsJson = False,
    write_readme: Annotated[
        bool,
        typer.Option(help=f"Refresh README.md, {page.STEPS} and {page.DATA}."),
    ] = False,
) -> None:
    """Show release by step: lines changed, upstream's status, and cached checks of the
    step as it is now.

    docs/data/steps.csv leaves out what depends on machine and day; the README has one
    row for each release."""
    with answering("status", as_json) as answer, using_cache() as cache:
        project = Project.find()
        pinned = releases.load(project)
        if write_readme:
            page.write_pages(project, pinned, overview(project, pinned))
        else:
            statuses = page.checked_statuses(project, cache, pinned)
            answer.data = statuses
            rows = []
            for slug, row in page.matrix(statuses, pinned.names):
                cells = (page.long_cell(step) if step else "-" for step in row)
                rows.append(
                    {"step": slug, **dict(zip(pinned.names, cells, strict=True))}
                )
            answer.table(rows, ("step", *pinned.names))
