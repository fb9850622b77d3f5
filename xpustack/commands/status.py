# SPDX-License-Identifier: Apache-2.0
"""`xpustack status`: the matrix of releases and steps, and the pages that show it."""

from xpustack.base import releases
from xpustack.core.project import Project
from xpustack.pages import status as page
from xpustack.pages.overview import overview
from xpustack.pages.record import write_files
from xpustack.terminal.console import Reply, using_cache


def status(*, write_readme: bool = False, answer: Reply) -> None:
    """Show release by step: lines changed, upstream's status, and cached checks of the
    step as it is now.

    docs/data/steps.csv leaves out what depends on machine and day; the README has one
    row for each release.

    Args:
        write_readme: Refresh README.md, docs/steps.md and docs/data/steps.csv.
    """
    with using_cache() as cache:
        project = Project.find()
        pinned = releases.load(project)
        if write_readme:
            write_files(page.pages(project, pinned, overview(project, pinned)))
        else:
            statuses = page.checked_statuses(project, cache, pinned)
            answer.data = statuses
            rows = []
            for slug, row in page.matrix(statuses, pinned.names):
                cells = (page.cell(step) if step else "-" for step in row)
                rows.append(
                    {"step": slug, **dict(zip(pinned.names, cells, strict=True))}
                )
            answer.table(rows, ("step", *pinned.names))
