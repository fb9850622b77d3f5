# SPDX-License-Identifier: Apache-2.0
"""`xpustack apply`."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.base import releases
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.cache import Cache
from xpustack.core.errors import StackError, UsageError
from xpustack.core.progress import Progress
from xpustack.core.project import Project
from xpustack.series.apply import trees_before_failure
from xpustack.series.tree import Series, Tree
from xpustack.series.worktree import apply_to
from xpustack.terminal.console import (
    AsJson,
    Offline,
    answering,
    showing_progress,
    using_cache,
)


def apply(
    release: Annotated[str | None, typer.Argument(help="Such as v0.22.1.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every release.")] = False,
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
        grown: list[Tree] = []
        with showing_progress() as progress, using_cache() as cache:
            project = Project.find()
            pinned = releases.load(project)
            if (release is None) is not all_:
                raise UsageError(
                    "name one RELEASE, or say --all", hint="xpustack apply --help"
                )
            for chosen in list(pinned) if release is None else [pinned[release]]:
                directory = to / chosen.name if to and all_ else to
                try:
                    series, problem = _apply(
                        project, cache, chosen, directory, upto, offline, progress
                    )
                except StackError as error:
                    series, problem = None, error
                grown += series.trees if series is not None else ()
                if problem is not None:
                    answer.fail(problem)
        rows = [
            {
                "release": tree.release.name,
                "step": tree.label,
                "commit": tree.commit,
                "tree": tree.tree_id,
            }
            for tree in grown
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
    """The release's trees, and the failure that kept further ones away."""
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
