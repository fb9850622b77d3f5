# SPDX-License-Identifier: Apache-2.0
"""A series carried over to another release, step by step.

The work happens in a repository like that of `apply`: the new release's base and
one commit for each step that could be carried. A conflict stops it there, as a
cherry-pick in progress; after a person has resolved it, the same command goes on
from the commits that it finds. Nothing outside that repository changes before
every step has found its place, and only when asked.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from xpustack.base import releases
from xpustack.base.pin import add, candidate
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.checks.obsolete import passes_on
from xpustack.core.cache import Cache, atomic_file
from xpustack.core.errors import UsageError
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.refresh.carry import Carried, Carrier, carrier
from xpustack.refresh.work import (
    OPEN,
    Moved,
    Outcome,
    commits_of,
    leave_conflict,
    needed_kernels,
    read_note,
    remember,
    settled,
    slugs_of,
    staged,
    working,
)
from xpustack.series.apply import trees
from xpustack.series.order import BASE_ALONE, read_order, require_step
from xpustack.series.patch import load_series
from xpustack.series.save import StaleFile, save
from xpustack.series.tree import Series, StepTree
from xpustack.series.worktree import BASE, BRANCH, Work

_WITHOUT = "its test passes without it"


@dataclass(frozen=True)
class Refreshed:
    """The report of a refresh: every step, in the order of the source's series.

    `stale` lists what was written to the project, None if nothing was asked for.
    """

    release: Release
    source: str
    steps: tuple[Moved, ...]
    seconds: float
    stale: list[StaleFile] | None = None
    directory: Path | None = None

    @property
    def open(self) -> tuple[Moved, ...]:
        return tuple(one for one in self.steps if one.outcome in OPEN)


def target_release(
    project: Project,
    cache: Cache,
    name: str,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> Release:
    """The release called `name`: pinned, or as it would be pinned.

    Raises:
        UsageError: it is neither pinned nor on the index.
        StackError: as `pin.candidate`.
    """
    pinned = releases.load(project)
    wanted = "v" + name.removeprefix("v")
    if wanted in pinned:
        return pinned[wanted]
    version = wanted.removeprefix("v")
    if not releases.is_version(version):
        return pinned[name]
    key = f"candidate-{version}"
    known = cache.results_get(key)
    if known is not None:
        return msgspec.convert(known, Release)
    if offline:
        return pinned[name]
    found = candidate(cache, version, progress)
    cache.results_put(key, msgspec.to_builtins(found))
    return found


def refresh(
    project: Project,
    cache: Cache,
    name: str,
    source: str,
    *,
    directory: Path | None = None,
    drop: tuple[str, ...] = (),
    tests: bool = False,
    test: tuple[str, ...] = (),
    write: bool = False,
    offline: bool = False,
    progress: Progress = silent,
) -> Refreshed:
    """Carry the steps of release `source` that release `name` lacks over to it.

    Args:
        directory: where the work repository is, or is to be; None for one that is
            thrown away.
        drop: slugs of steps that a person decided not to carry.
        tests: judge by the steps' tests as well whether they are obsolete.
        test: judge these steps so, if not all.
        write: pin the release if need be, and write its series, once no step is
            open.

    Raises:
        UsageError: an unknown release or step, or `directory` holds something
            else, or changes that are not committed.
        StackError: as `trees` and `save`; the project is then as it was.
    """
    begin = time.monotonic()
    pinned = releases.load(project)
    origin = pinned[source]
    release = target_release(project, cache, name, offline=offline, progress=progress)
    if release.name == origin.name:
        raise UsageError(
            "a series cannot be carried to the release it comes from",
            release=release.name,
            hint="xpustack refresh --help",
        )
    slugs = [step.slug for step in load_series(project, origin.name)]
    for slug in (*drop, *test):
        require_step(slugs, slug, origin.name)
    made = trees(Store(cache), project, origin, offline=offline, progress=progress)
    with working(
        project, cache, release, origin, directory, offline=offline, progress=progress
    ) as (work, scratch):
        run = _Run(project, cache, release, work, made, set(drop), progress)
        run.go(scratch, frozenset(slugs if tests else test))
        stale = None
        if write and not run.open:
            stale = _write(project, cache, release, run, progress)
    seconds = time.monotonic() - begin
    return Refreshed(release, origin.name, tuple(run.moved), seconds, stale, directory)


@dataclass
class _Run:
    """One pass over the source's steps."""

    project: Project
    cache: Cache
    release: Release
    work: Work
    made: Series
    drop: set[str]
    progress: Progress
    moved: list[Moved] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return any(one.outcome in OPEN for one in self.moved)

    @property
    def gone(self) -> tuple[str, ...]:
        """The steps that were judged to have no place on the new release."""
        left = ("dropped", "obsolete", "upstream")
        return tuple(one.step for one in self.moved if one.outcome in left)

    def go(self, scratch: Path, judged: frozenset[str]) -> None:
        note = read_note(self.work)
        gone = {
            one.step: one for one in note.done if one.outcome in ("dropped", "obsolete")
        }
        state = self.work.state
        carry = carrier(
            self.work.git.directory, scratch, self.made.base.commit, state.base
        )
        head = self.work.git.commit_of(BRANCH)
        here = slugs_of(self.work)
        stopped: StepTree | None = None
        waiting: set[str] = set()
        for tree in self.made.steps:
            slug = tree.slug
            if slug in here:
                self.moved.append(settled(note, slug))
                continue
            if slug in self.drop:
                self.moved.append(Moved(slug, "dropped", "as asked"))
                continue
            if slug in gone:
                self.moved.append(gone[slug])
                continue
            self.progress(f"carrying {slug} to {self.release.name}")
            found = carry.carry(tree, head)
            ask = found.tree is None and slug in judged and stopped is None
            if ask and self._passes_without(tree):
                self._add(slug, found, "obsolete", _WITHOUT)
                continue
            later = stopped is not None
            if waiting & set(tree.changed):
                text = "it changes files of a step that is open"
                self._add(slug, found, "waits", text, tentative=True)
            elif found.tree is None:
                self._add(slug, found, "conflict", tentative=later)
            else:
                self._add(slug, found, found.verdict, tentative=later)
                if found.verdict != "upstream":
                    kernels = needed_kernels(self.project, tree.step)
                    whole = carry.with_files(found.tree, kernels)
                    head = carry.commit(tree, whole, head)
                    if not later:
                        self.work.git.reset(head)
                        self._remember()
                continue
            waiting |= set(tree.changed)
            stopped = stopped or tree
        self._remember()
        if stopped is not None:
            kernels = needed_kernels(self.project, stopped.step)
            leave_conflict(self.work, stopped, kernels)
        elif useless := self._obsolete(judged):
            self._leave_out(useless, carry)
            self.moved = []
            self.go(scratch, frozenset())

    def _add(
        self,
        slug: str,
        found: Carried,
        outcome: Outcome,
        text: str = "",
        *,
        tentative: bool = False,
    ) -> None:
        clashes = found.clashes if outcome == "conflict" else ()
        self.moved.append(
            Moved(
                slug, outcome, text or found.evidence, clashes, found.files, tentative
            )
        )

    def _remember(self) -> None:
        remember(self.work, self.made.base.release.name, self.moved)

    def _passes_without(self, tree: StepTree) -> bool:
        """Whether the test of a step passes on what has been carried so far."""
        with staged(self.project, self.cache, self.release) as project:
            _save(project, self.cache, self.work, self.gone)
            step = replace(tree.step, release=self.release.name)
            return passes_on(
                project, self.cache, self.release, step, None, self.progress
            )

    def _obsolete(self, judged: frozenset[str]) -> set[str]:
        """The carried steps among `judged` whose tests pass without them."""
        fresh = {
            one.step
            for one in self.moved
            if one.outcome in ("clean", "merged", "resolved") and one.step in judged
        }
        if not fresh:
            return set()
        slugs = [BASE_ALONE, *slugs_of(self.work)]
        with staged(self.project, self.cache, self.release) as project:
            _save(project, self.cache, self.work, self.gone)
            return {
                step.slug
                for step in load_series(project, self.release.name)
                if step.slug in fresh
                and passes_on(
                    project,
                    self.cache,
                    self.release,
                    step,
                    slugs[slugs.index(step.slug) - 1],
                    self.progress,
                )
            }

    def _leave_out(self, gone: set[str], carry: Carrier) -> None:
        """Take steps out from between the commits, which stay as they are otherwise:
        what a person resolved or added is there. Where a commit needs what is gone,
        it and the later ones are left to be carried from the source again."""
        head = BASE
        for commit, slug in commits_of(self.work):
            if slug in gone:
                continue
            moved = carry.again(commit, head)
            if moved is None:
                break
            head = moved
        self.work.git.reset(head)
        self.moved = [
            Moved(one.step, "obsolete", _WITHOUT) if one.step in gone else one
            for one in self.moved
        ]
        self._remember()


def _require_own(project: Project, release: Release, stale: list[StaleFile]) -> None:
    """Insist that a refresh writes nothing but what belongs to its release.

    Raises:
        UsageError: the work repository holds older kernels or overlay files.
    """
    folders = (project.series_dir(release.name), project.overlay / release.name)
    others = [
        str(one.path)
        for one in stale
        if not any((project.root / one.path).is_relative_to(own) for own in folders)
    ]
    if others:
        raise UsageError(
            "kernels or overlay changed since the steps were carried, or were"
            " changed in the work repository",
            release=release.name,
            detail=others,
            hint="the same command with a new --to DIR",
        )


def _save(
    project: Project,
    cache: Cache,
    work: Work,
    gone: Iterable[str],
    dry_run: bool = False,
) -> list[StaleFile]:
    """Save, and let those of the steps `gone` leave that an earlier run wrote."""
    left = set(read_order(project, work.state.release)) - set(slugs_of(work))
    drop = [slug for slug in gone if slug in left]
    return save(project, cache, work.git.work_tree, dry_run, drop=drop)


def _write(
    project: Project, cache: Cache, release: Release, run: _Run, progress: Progress
) -> list[StaleFile]:
    """Pin and save; a pin whose series cannot be saved is taken back."""
    before = project.releases_file.read_bytes()
    unpinned = release.name not in releases.load(project)
    if unpinned:
        add(project, release)
    try:
        progress(f"writing the series of {release.name}")
        stale = _save(project, cache, run.work, run.gone, dry_run=True)
        _require_own(project, release, stale)
        _save(project, cache, run.work, run.gone)
    except BaseException:
        with atomic_file(project.releases_file) as file:
            file.write(before)
        raise
    return stale
