# SPDX-License-Identifier: Apache-2.0
"""`xpustack status`, `defects` and `site`: what the series and the checks show."""

import subprocess
from pathlib import Path

from stack.base import releases
from stack.core.errors import EnvironmentProblem, elsewhere
from stack.core.project import Project
from stack.pages import defects as listed
from stack.pages import made
from stack.pages import status as statuses
from stack.pages.overview import overview
from stack.pages.record import write_files
from stack.pages.site.build import build_site
from stack.terminal.console import Offline, Reply, using_cache, working


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
            write_files(statuses.pages(project, pinned, overview(project, pinned)))
        else:
            found = statuses.checked_statuses(project, cache, pinned)
            answer.data = found
            rows = []
            for slug, row in statuses.matrix(found, pinned.names):
                cells = (statuses.cell(step) if step else "-" for step in row)
                rows.append(
                    {"step": slug, **dict(zip(pinned.names, cells, strict=True))}
                )
            answer.table(rows, ("step", *pinned.names))


def defects(*, write: bool = False, offline: Offline = False, answer: Reply) -> None:
    """Show each defect of upstream: what the tests found before a step and after it.

    The figures are those that `xpustack check` stored; a step that was not checked
    as it is now has none. --write keeps those that the file has of such a step.

    Args:
        write: Refresh docs/defects.md and docs/data/defects.csv.
    """
    with working(offline) as (project, cache):
        observed = listed.observations(project, cache)
        if write:
            listed.write(project, observed)
    rows = [
        {
            "defect": row.id,
            "release": row.release,
            "before": row.before,
            "after": row.after,
        }
        for row in observed
    ]
    answer.data = {"defects": rows}
    answer.table(rows, ("defect", "release", "before", "after"))


def renew(*, run: bool = False, answer: Reply) -> None:
    """Show which rows of docs/data are of an earlier tree, and what makes them anew.

    Args:
        run: Run those commands, which takes hours.
    """
    with working() as (project, _):
        older = [age for age in made.ages(project) if age.older]
        commands = list(dict.fromkeys(age.command for age in older if age.command))
        answer.data = {"older": older, "commands": commands}
        shown = ("table", "release", "current", "older", "since")
        rows = [{name: getattr(age, name) for name in shown} for age in older]
        answer.table(rows, shown)
        for table, by in {age.table: age.by for age in older if age.by}.items():
            answer.say(f"{table}.csv: {by}")
        for one in commands:
            answer.say(f"next: {one}")
            if run and subprocess.call(one, shell=True, cwd=project.root):
                raise EnvironmentProblem(
                    f"no new rows: this failed: {one}",
                    path=project.root / made.TABLES,
                    hint="xpustack renew",
                )


def site(*, to: Path = Path("build/site"), answer: Reply) -> None:
    """Build the pages, with sortable tables and charts, for a browser without a
    network. Open index.html of the folder.

    Args:
        to: The folder to write.
    """
    with working() as (project, cache), elsewhere(to):
        pages = build_site(project, cache, to)
    answer.data = {"directory": str(to.absolute()), "pages": pages}
    answer.say(f"{pages} pages in {to}")
