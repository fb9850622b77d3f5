# SPDX-License-Identifier: Apache-2.0
"""The work repository of a refresh."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from stack.base.download import base_of
from stack.base.releases import Release
from stack.base.store import Store
from stack.core.cache import Cache, atomic_dir
from stack.core.errors import UsageError
from stack.core.files import not_ours, vacant
from stack.core.project import Project
from stack.refresh.carry import CarryVerdict, Clash, TouchedFile
from stack.series.apply import trees
from stack.series.tree import StepTree
from stack.series.worktree import (
    BASE,
    BRANCH,
    STATE,
    STEP_LINE,
    State,
    Work,
    fill,
    link_objects,
)

Outcome = Literal[CarryVerdict, "present", "resolved", "dropped", "waits", "left"]
OPEN: tuple[Outcome, ...] = ("conflict", "waits")
"""Outcomes of steps that still need a decision."""


class StepOutcome(msgspec.Struct, frozen=True):
    """The outcome of one step.

    `tentative` marks an outcome after a conflict, judged without the conflicting
    step; `text` says why, `files` are the files that the step's diff changes.
    """

    step: str
    outcome: Outcome
    text: str = ""
    clashes: tuple[Clash, ...] = ()
    files: tuple[TouchedFile, ...] = ()
    tentative: bool = False


@contextmanager
def working(
    project: Project,
    cache: Cache,
    release: Release,
    origin: Release,
    directory: Path | None,
) -> Iterator[tuple[Work, Path]]:
    """The work repository: that of an earlier run, or a new one."""
    with cache.scratch() as scratch:
        if directory is not None and noted_source(directory) is not None:
            work = _resumed(directory, release, origin)
            link_objects(Store(cache), work.git)
            yield work, scratch
            return
        store = Store(cache)
        base = base_of(store, release)
        target = trees(store, project, release)
        state = State(release.name, base.id, target.tip.commit, source=origin.name)
        place = (directory or scratch / "work").absolute()
        if not vacant(place):
            raise not_ours(place, release.name, "refresh")
        with atomic_dir(place) as temporary:
            fill(store, temporary, state)
        yield Work.at(place), scratch


def _resumed(directory: Path, release: Release, origin: Release) -> Work:
    work = Work.at(directory)
    state = work.state
    if (state.release, state.source) != (release.name, origin.name):
        raise UsageError(
            "the directory belongs to another refresh",
            release=release.name,
            path=directory,
            detail=[f"it carries {state.source} to {state.release}"],
            hint="choose a new directory",
        )
    if changes := work.pending():
        raise work.refusal(
            "the directory has changes that are not committed: resolve them first",
            *changes[:10],
            hint=f"{work.command('status')}; then git add, and git cherry-pick"
            " --continue (or --abort, and --drop STEP here)",
        )
    if marked := work.git.conflict_markers(BASE, BRANCH):
        raise work.refusal(
            "a commit in the directory holds conflict markers",
            *marked[:10],
            hint=f"{work.command('rebase', '-i', 'base')}, and resolve it there",
        )
    return work


def noted_source(directory: Path) -> str | None:
    """The release that an earlier run in `directory` carries from; None if that is no
    work repository of a refresh."""
    if not (directory / ".git" / STATE).is_file():
        return None
    return Work.at(directory).state.source


def commits_of(work: Work, last: str = BRANCH) -> dict[str, str]:
    """The commits since the base up to `last` by their slugs, oldest first."""
    commits = {}
    for commit in work.git.log(BASE, last):
        if match := STEP_LINE.search(commit.message):
            commits[match[1]] = commit.id
    return commits


def leave_conflict(work: Work, tree: StepTree, kernels: Mapping[str, bytes]) -> None:
    """Leave the conflicting step as a cherry-pick in progress. Add those of `kernels`
    that the work tree lacks."""
    work.git.cherry_pick(tree.commit)
    for path, content in kernels.items():
        target = work.git.work_tree / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            work.git.stage(path)
