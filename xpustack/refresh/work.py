# SPDX-License-Identifier: Apache-2.0
"""The work repository of a refresh, and the note that the refresh keeps in it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from xpustack.base.download import base_of
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.cache import Cache, atomic_dir, atomic_file
from xpustack.core.errors import UsageError
from xpustack.core.files import not_ours, vacant
from xpustack.core.project import Project
from xpustack.refresh.carry import Clash, TouchedFile
from xpustack.series.apply import trees
from xpustack.series.commits import STEP_LINE, quoted
from xpustack.series.order import read_order
from xpustack.series.tree import StepTree
from xpustack.series.worktree import (
    BASE,
    BRANCH,
    State,
    Work,
    fill,
    link_objects,
    open_work,
    pending,
)

NOTE = "xpustack-refresh.json"

Outcome = Literal[
    "present",
    "clean",
    "merged",
    "variant",
    "resolved",
    "upstream",
    "dropped",
    "conflict",
    "waits",
]
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


class Note(msgspec.Struct, frozen=True):
    """A work repository's note on its refresh: the release that steps come from, the
    steps that the new release had before, and the outcomes, done and open."""

    source: str
    own: tuple[str, ...] = ()
    done: tuple[StepOutcome, ...] = ()
    open: tuple[StepOutcome, ...] = ()


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
        if directory is not None and (directory / ".git" / NOTE).is_file():
            work = _resumed(directory, release, origin)
            link_objects(Store(cache), work.git)
            yield work, scratch
            return
        store = Store(cache)
        base = base_of(store, release)
        target = trees(store, project, release)
        state = State(release.name, base.id, target.tip.commit)
        place = (directory or scratch / "work").absolute()
        if not vacant(place):
            raise not_ours(place, release.name, "refresh")
        with atomic_dir(place) as temporary:
            fill(store, temporary, state)
            own_slugs = tuple(read_order(project, release.name))
            (temporary / ".git" / NOTE).write_bytes(
                msgspec.json.encode(Note(origin.name, own_slugs)) + b"\n"
            )
        yield open_work(place), scratch


def _resumed(directory: Path, release: Release, origin: Release) -> Work:
    work = open_work(directory)
    note = read_note(work)
    if (work.state.release, note.source) != (release.name, origin.name):
        raise UsageError(
            "the directory belongs to another refresh",
            release=release.name,
            path=directory,
            detail=[f"it carries {note.source} to {work.state.release}"],
            hint="choose a new directory",
        )
    if changes := pending(work):
        raise UsageError(
            "the directory has changes that are not committed: resolve them first",
            release=release.name,
            path=directory,
            detail=changes[:10],
            hint=f"git -C {quoted(work)} status; then git add, and git cherry-pick"
            " --continue (or --abort, and --drop STEP here)",
        )
    if marked := work.git.conflict_markers(BASE, BRANCH):
        raise UsageError(
            "a commit in the directory holds conflict markers",
            release=release.name,
            path=directory,
            detail=marked[:10],
            hint=f"git -C {quoted(work)} rebase -i base, and resolve it there",
        )
    return work


def noted_source(directory: Path) -> str | None:
    """The release that an earlier run in `directory` carries from; None if that is no
    work repository of a refresh."""
    if not (directory / ".git" / NOTE).is_file():
        return None
    return read_note(open_work(directory)).source


def settled_outcome(note: Note, slug: str) -> StepOutcome:
    """The outcome of a step whose commit is there."""
    for outcome in note.done:
        if outcome.step == slug:
            return outcome
    if slug in note.own:
        return StepOutcome(slug, "present")
    before = next(
        (outcome for outcome in note.open if outcome.step == slug),
        StepOutcome(slug, "waits"),
    )
    return StepOutcome(slug, "resolved", "by hand", before.clashes, before.files)


def remember(work: Work, source: str, outcomes: Sequence[StepOutcome]) -> None:
    """Note the outcomes that a later run must not judge again."""
    judged_again = (*OPEN, "upstream", "present")
    done = tuple(
        outcome
        for outcome in outcomes
        if not outcome.tentative and outcome.outcome not in judged_again
    )
    open_ = tuple(outcome for outcome in outcomes if outcome.outcome in OPEN)
    note = Note(source, read_note(work).own, done, open_)
    with atomic_file(work.git.directory / NOTE) as file:
        file.write(msgspec.json.encode(note) + b"\n")


def read_note(work: Work) -> Note:
    """The note that `remember` wrote last.

    Raises:
        UsageError: the note is damaged.
    """
    path = work.git.directory / NOTE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            "the note of xpustack refresh in the directory is damaged",
            release=work.state.release,
            path=path,
            detail=[str(error)],
            hint="the same command with a new --to DIR",
        ) from None


def commits_of(work: Work) -> list[tuple[str, str]]:
    """The commits since the base, oldest first, each with its slug; a commit
    without one has an empty slug."""
    commits = []
    for commit in work.git.log(BASE, BRANCH):
        match = STEP_LINE.search(commit.message)
        commits.append((commit.id, match[1] if match else ""))
    return commits


def slugs_of(work: Work) -> list[str]:
    """The slugs of the commits since the base, oldest first."""
    return [slug for _, slug in commits_of(work) if slug]


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
