# SPDX-License-Identifier: Apache-2.0
"""`xpustack apply`, `save` and `rederive`: a series as trees, and back as patches."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stack.base import releases
from stack.base.store import Store
from stack.core.cache import atomic_file
from stack.core.errors import CheckFailed, StackError, UsageError, command, elsewhere
from stack.core.project import Project
from stack.series.apply import trees, trees_before_failure
from stack.series.order import unnamed
from stack.series.recorded import format_trees, read_trees, trees_file
from stack.series.save import save as save_series
from stack.series.tree import Series, Tree
from stack.series.worktree import apply_to
from stack.terminal.console import (
    AllReleases,
    Offline,
    ReleaseName,
    Reply,
    selected,
    working,
)


def apply(
    release: ReleaseName = None,
    /,
    *,
    all_: AllReleases = False,
    upto: str | None = None,
    to: Path | None = None,
    offline: Offline = False,
    answer: Reply,
) -> None:
    """Apply a series: as trees in the cache, and with --to as a git repository.

    Args:
        upto: The last step's slug, or base.
        to: The repository to make; with --all one folder in it each.
    """
    grown: list[Tree] = []
    made: list[str] = []
    with working(offline) as (project, cache):
        store, pinned = Store(cache), releases.load(project)
        for chosen in selected(pinned, release, all_, "apply"):
            try:
                if to is None:
                    series = trees_before_failure(store, project, chosen, upto=upto)
                else:
                    directory = to / chosen.name if all_ else to
                    with elsewhere(to):
                        series = apply_to(project, cache, chosen, directory, upto)
                    made += [
                        f"{chosen.name}: {len(series.steps)} steps on branch series,"
                        " each with a tag step/<slug>",
                        f"  next: commit; {command('xpustack', 'save', directory)}",
                    ]
            except StackError as error:
                answer.fail(error)
                continue
            grown += series.trees
            if series.problem is not None:
                answer.fail(series.problem)
                continue
            for stray in unnamed(project):
                cache.progress(f"no series names {stray}")
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
    if rows and to is None:
        answer.table(rows, ("release", "step", "commit", "tree"))
    answer.say(*made)


def save(
    directory: Path,
    /,
    *,
    dry_run: bool = False,
    drop: tuple[str, ...] = (),
    alone: bool = False,
    answer: Reply,
) -> None:
    """Write patches, overlay and trailers back from the commits in DIRECTORY, for all
    releases that share the patches.

    A dry run that finds stale files ends with exit code 1.

    Args:
        directory: What `apply --to` made.
        dry_run: List stale files, write none.
        drop: A step that is to leave the series; repeatable.
        alone: Change this release's steps alone, none of another.
    """
    with working() as (project, cache):
        stale = save_series(project, cache, directory, dry_run, drop=drop, alone=alone)
    lines = [f"{file.kind} {file.path}" for file in stale]
    answer.data = {"stale": lines, "written": not dry_run}
    answer.say(*(lines or ["nothing to save"]))
    if stale and dry_run:
        answer.say("a dry run: nothing was written")
        answer.exit_code = CheckFailed.exit_code
    elif stale:
        answer.say("  next: xpustack check RELEASE STEP; xpustack stamp --all")


def rederive(
    *names: Annotated[str, Parameter("RELEASE")],
    all_: AllReleases = False,
    offline: Offline = False,
    answer: Reply,
) -> None:
    """Apply a series anew, and record the tree of each step.

    For an edit of a patch, an overlay file, a kernel or the order that was not made by
    `save`. A release whose series does not apply keeps its record.

    Args:
        names: Such as v0.22.1.
    """
    changed: dict[str, list[str]] = {}
    if bool(names) is all_:
        raise UsageError(
            "name a release, or say --all", hint="xpustack rederive --help"
        )
    with working(offline) as (project, cache):
        pinned = releases.load(project)
        for release in pinned if all_ else [pinned[name] for name in names]:
            try:
                series = trees(Store(cache), project, release, recorded=False)
            except StackError as error:
                answer.fail(error)
            else:
                slugs = _record(project, series)
                changed |= {} if slugs is None else {release.name: slugs}
    answer.data = {"changed": changed}
    for name, slugs in changed.items():
        first = f"from {slugs[0]} on: {len(slugs)}" if slugs else "in another order"
        answer.say(f"{name}: trees recorded {first}")
    if not changed and not answer.errors:
        answer.say("every recorded tree is right")


def _record(project: Project, series: Series) -> list[str] | None:
    """Write a release's record of trees. The steps whose tree it had otherwise; None
    where it is right."""
    name = series.base.release.name
    place, text = trees_file(project, name), format_trees(series.steps)
    before = place.read_bytes() if place.exists() else b""
    if text == before:
        return None
    ids = read_trees(project, name) if before else {}
    with atomic_file(place) as file:
        file.write(text)
    return [tree.slug for tree in series.steps if ids.get(tree.slug) != tree.tree_id]
