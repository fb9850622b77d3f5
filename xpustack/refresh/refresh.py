# SPDX-License-Identifier: Apache-2.0
"""Carry a series over to another release, step by step.

The work repository is like that of `apply`: the new release's base and one commit for
each step that could be carried. At a conflict the run stops there with a cherry-pick in
progress. Once a person has resolved it, the same command continues from the commits in
the repository. Nothing outside the repository changes until every step is carried or
left out, and then only with `write`.
"""

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from xpustack.base import releases
from xpustack.base.clone import Clone
from xpustack.base.pin import add, candidate
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.cache import Cache, atomic_file
from xpustack.core.errors import UsageError
from xpustack.core.project import Project
from xpustack.refresh.carry import Carrier, carrier, carry_step
from xpustack.refresh.work import (
    OPEN,
    StepOutcome,
    commits_of,
    leave_conflict,
    working,
)
from xpustack.series.apply import trees
from xpustack.series.order import read_order, require_step
from xpustack.series.overlay import needed_kernels
from xpustack.series.patch import load_series
from xpustack.series.recorded import TREES, trees_file
from xpustack.series.save import save
from xpustack.series.staging import StaleFile
from xpustack.series.tree import Series, StepTree
from xpustack.series.worktree import BRANCH, Work


@dataclass(frozen=True)
class RefreshReport:
    """The report of a refresh: every step, in the order of the source's series.

    `stale` lists the files written to the project; it is None without `write`. `ref` is
    what was asked of a clone.
    """

    release: Release
    source: str
    steps: tuple[StepOutcome, ...]
    seconds: float
    stale: list[StaleFile] | None = None
    directory: Path | None = None
    ref: str = ""

    @property
    def open(self) -> tuple[StepOutcome, ...]:
        return tuple(step for step in self.steps if step.outcome in OPEN)


def target_release(project: Project, cache: Cache, name: str) -> Release:
    """The release called `name`, as it is pinned or as it would be.

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
    stored = cache.results_get(key)
    if stored is not None:
        return msgspec.convert(stored, Release)
    if cache.offline:
        return pinned[name]
    release = candidate(cache, version)
    cache.results_put(key, msgspec.to_builtins(release))
    return release


def refresh(
    project: Project,
    cache: Cache,
    name: str,
    source: str,
    *,
    directory: Path | None = None,
    drop: tuple[str, ...] = (),
    write: bool = False,
    clone: Clone | None = None,
) -> RefreshReport:
    """Carry to release `name` the steps of release `source` that it lacks.

    Args:
        name: is not asked for with a `clone`.
        clone: the commit to carry to, in place of a release.
        directory: the place of the work repository, new or not; None for a
            temporary one.
        drop: slugs of steps that a person decided not to carry.
        write: once no step is open, write the series, and pin the release if it is
            not pinned.

    Raises:
        UsageError: an unknown release or step, or `directory` holds something
            else, or changes that are not committed.
        StackError: as `trees` and `save`; the project is then unchanged.
    """
    begin = time.monotonic()
    pinned = releases.load(project)
    origin = pinned[source]
    if clone is None:
        release = target_release(project, cache, name)
    else:
        release, _ = clone.base(Store(cache), origin)
    if release.name == origin.name:
        raise UsageError(
            "a series cannot be carried to the release it comes from",
            release=release.name,
            hint="xpustack refresh --help",
        )
    slugs = [step.slug for step in load_series(project, origin.name)]
    for slug in drop:
        require_step(slugs, slug, origin.name)
    series = trees(Store(cache), project, origin)
    with working(project, cache, release, origin, directory) as (work, scratch):
        run = _RefreshRun(project, cache, release, work, series, set(drop), clone)
        run.go(scratch)
        stale = None
        if write and not run.open:
            stale = _write(project, cache, release, run)
    seconds = time.monotonic() - begin
    return RefreshReport(
        release,
        origin.name,
        tuple(run.outcomes),
        seconds,
        stale,
        directory,
        clone.ref if clone else "",
    )


@dataclass
class _RefreshRun:
    """One pass over the source's steps."""

    project: Project
    cache: Cache
    release: Release
    work: Work
    series: Series
    drop: set[str]
    clone: Clone | None
    outcomes: list[StepOutcome] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return any(step.outcome in OPEN for step in self.outcomes)

    @property
    def gone(self) -> tuple[str, ...]:
        """The steps that the new release does without."""
        reasons = ("dropped", "upstream")
        return tuple(step.step for step in self.outcomes if step.outcome in reasons)

    def go(self, scratch: Path) -> None:
        state = self.work.state
        carry = self._carrier(scratch, state.base)
        own = commits_of(self.work, state.tip)
        commits = commits_of(self.work)
        head = self.work.git.commit_of(BRANCH)
        conflicting: StepTree | None = None
        open_paths: set[str] = set()
        for tree in self.series.steps:
            slug = tree.slug
            if slug in own:
                self.outcomes.append(StepOutcome(slug, "present"))
                continue
            if slug in commits:
                self.outcomes.append(self._settled(carry, tree, commits[slug]))
                continue
            if slug in self.drop:
                self.outcomes.append(StepOutcome(slug, "dropped", "as asked"))
                continue
            self.cache.progress(f"carrying {slug} to {self.release.name}")
            waits = bool(open_paths & set(tree.changed))
            carried = carry_step(self.project, carry, tree, head, variants=not waits)
            tentative = waits or conflicting is not None
            verdict, why, clashes = carried.verdict, carried.evidence, carried.clashes
            outcome = StepOutcome(slug, verdict, why, clashes, carried.files, tentative)
            if waits:
                why = "it changes files of a step that is open"
                outcome = StepOutcome(slug, "waits", why, (), carried.files, tentative)
            self.outcomes.append(outcome)
            if not waits and carried.tree is not None:
                if carried.verdict != "upstream":
                    head = carry.commit(carried.form, carried.tree, head)
                    if not tentative:
                        self.work.git.reset(head)
                continue
            open_paths |= set(tree.changed)
            conflicting = conflicting or tree
        if conflicting is not None:
            kernels = needed_kernels(self.project, conflicting.step)
            leave_conflict(self.work, conflicting, kernels)

    def _carrier(self, scratch: Path, onto: str) -> Carrier:
        """Carries to the commit `onto`, with what a clone knows of the way there."""
        base, clone = self.series.base, self.clone
        carry = carrier(self.work.git.directory, scratch, base.commit, onto)
        if clone is not None and (since := clone.since(base.release)) is not None:
            return replace(carry, history=functools.partial(clone.commits, since))
        return carry

    def _settled(self, carry: Carrier, tree: StepTree, commit: str) -> StepOutcome:
        """The outcome of a step whose commit an earlier run, or a person, made."""
        done = carry_step(self.project, carry, tree, f"{commit}^")
        # A variant that is called after the release is what a person made of it.
        own = done.form.path.stem == self.release.name
        if done.tree == self.work.git.tree_of(commit) and not own:
            text, verdict = done.evidence, done.verdict
            return StepOutcome(tree.slug, verdict, text, done.clashes, done.files)
        return StepOutcome(tree.slug, "resolved", "by hand", done.clashes, done.files)


def _require_own(project: Project, release: Release, stale: list[StaleFile]) -> None:
    """Require that a refresh writes only files of its own release.

    Raises:
        UsageError: the work repository holds older kernels or overlay files.
    """
    own = trees_file(project, release.name), project.overlay / release.name
    shared = (project.overlay, project.kernels)
    others = [
        str(file.path)
        for file in stale
        if not any((project.root / file.path).is_relative_to(place) for place in own)
        and (
            file.path.name == TREES
            or any(
                (project.root / file.path).is_relative_to(folder) for folder in shared
            )
        )
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
    """Save the series, and remove those steps of `gone` that an earlier run wrote."""
    unwanted = set(read_order(project, work.state.release)) - commits_of(work).keys()
    drop = [slug for slug in gone if slug in unwanted]
    return save(project, cache, work.git.work_tree, dry_run, drop=drop, alone=True)


def _write(
    project: Project, cache: Cache, release: Release, run: _RefreshRun
) -> list[StaleFile]:
    """Pin and save. If the series cannot be saved, undo the pin."""
    before = project.releases_file.read_bytes()
    unpinned = release.name not in releases.load(project)
    if unpinned:
        add(project, release)
    try:
        cache.progress(f"writing the series of {release.name}")
        stale = _save(project, cache, run.work, run.gone, dry_run=True)
        _require_own(project, release, stale)
        _save(project, cache, run.work, run.gone)
    except BaseException:
        with atomic_file(project.releases_file) as file:
            file.write(before)
        raise
    return stale
