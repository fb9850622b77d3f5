# SPDX-License-Identifier: Apache-2.0
"""`xpustack apply`: a series as trees in the cache, or as a git repository."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.base import releases
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.cache import Cache
from xpustack.core.errors import StackError
from xpustack.core.progress import Progress
from xpustack.core.project import Project
from xpustack.series.apply import trees_before_failure
from xpustack.series.order import unnamed
from xpustack.series.tree import Series, Tree
from xpustack.series.worktree import apply_to
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)
from xpustack.terminal.selection import AllReleases, ReleaseName, selected


def apply(
    release: ReleaseName = None,
    all_: AllReleases = False,
    upto: Annotated[
        str | None, typer.Option(help="The last step's slug, or base.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="The repository to make; with --all one folder in it each."),
    ] = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Apply a series: as trees in the cache, and with --to as a git repository."""
    with answering("apply", as_json) as answer:
        trees: list[Tree] = []
        with showing_progress() as progress, using_cache() as cache:
            project = Project.find()
            pinned = releases.load(project)
            for chosen in selected(pinned, release, all_, "apply"):
                directory = to / chosen.name if to and all_ else to
                try:
                    series, problem = _apply(
                        project, cache, chosen, directory, upto, offline, progress
                    )
                except StackError as error:
                    series, problem = None, error
                trees += series.trees if series is not None else ()
                if problem is None:
                    for stray in unnamed(project):
                        progress(f"no series names {stray}")
                if problem is not None:
                    answer.fail(problem)
        rows = [
            {
                "release": tree.release.name,
                "step": tree.label,
                "commit": tree.commit,
                "tree": tree.tree_id,
            }
            for tree in trees
        ]
        answer.data = {"trees": rows}
        answer.table(rows, ("release", "step", "commit", "tree"))


def _apply(
    project: Project,
    cache: Cache,
    release: Release,
    directory: Path | None,
    upto: str | None,
    offline: bool,
    progress: Progress,
) -> tuple[Series | None, StackError | None]:
    """The release's trees, and the failure after which there are no more."""
    if directory is None:
        return trees_before_failure(
            Store(cache),
            project,
            release,
            offline=offline,
            progress=progress,
            upto=upto,
        )
    series = apply_to(
        project, cache, release, directory, upto, offline=offline, progress=progress
    )
    return series, None
