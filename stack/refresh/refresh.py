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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stack.base import releases
from stack.base.clone import Clone
from stack.base.pin import add, candidate
from stack.base.releases import Release
from stack.base.store import Store
from stack.core.cache import Cache, atomic_file
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.refresh.carry import Carrier
from stack.refresh.work import (
    OPEN,
    StepOutcome,
    commits_of,
    leave_conflict,
    working,
)
from stack.series.apply import trees
from stack.series.order import read_order, require_step
from stack.series.overlay import needed_kernels
from stack.series.patch import load_series
from stack.series.recorded import TREES
from stack.series.revision import content, step_digests
from stack.series.save import save
from stack.series.staging import StaleFile
from stack.series.tree import Series, StepTree
from stack.series.worktree import BRANCH, Work


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
    if not releases.is_version(version) or pinned.has_version(version):
        return pinned[name]
    key = f"candidate-{version}"
    stored = cache.results_get(key)
    if stored is not None:
        return msgspec.convert(stored, Release)
    if cache.offline:
        return pinned[name]
    release = candidate(cache, version, pinned)
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
    finished = directory is None and clone is None and _finished(project, release)
    with working(project, cache, release, origin, directory) as (work, scratch):
        left = {slug: "as asked before" for slug in work.state.dropped}
        left |= dict.fromkeys(drop, "as asked")
        work.note(msgspec.structs.replace(work.state, dropped=tuple(left)))
        git = work.git.directory
        carry = Carrier(project, git, scratch, series.base.commit, work.state.base)
        if clone is not None and (since := clone.since(origin)) is not None:
            carry = replace(carry, history=functools.partial(clone.commits, since))
        steps = tuple(_carry_all(cache, work, carry, series, left, finished))
        done = RefreshReport(
            release,
            origin.name,
            steps,
            0.0,
            None,
            directory,
            clone.ref if clone else "",
        )
        if write and not done.open:
            done = replace(done, stale=_write(project, cache, release, work, done))
    return replace(done, seconds=time.monotonic() - begin)


def _finished(project: Project, release: Release) -> bool:
    """Whether a release's series is the one that its revision holds: somebody decided
    on each step that there was."""
    if not release.content:
        return False
    return release.content == content(
        step_digests(project, load_series(project, release.name))
    )


def _carry_all(
    cache: Cache,
    work: Work,
    carry: Carrier,
    series: Series,
    left: Mapping[str, str],
    finished: bool,
) -> Iterator[StepOutcome]:
    """The outcome of each of the source's steps. The work repository's branch gets
    those before the first conflict, which is left there.

    Args:
        left: why steps are left behind, by slug.
        finished: leave a step that conflicts behind, too.
    """
    own, commits = commits_of(work, work.state.tip), commits_of(work)
    head = work.git.commit_of(BRANCH)
    conflicting: StepTree | None = None
    open_paths: set[str] = set()
    for tree in series.steps:
        slug = tree.slug
        if slug in own:
            yield StepOutcome(slug, "present")
            continue
        if slug in commits:
            yield _settled(work, carry, tree, commits[slug])
            continue
        if slug in left:
            yield StepOutcome(slug, "dropped", left[slug])
            continue
        cache.progress(f"carrying {slug} to {work.state.release}")
        waits = bool(open_paths & set(tree.changed))
        carried = carry.carry(tree, head, variants=not waits)
        if finished and carried.verdict == "conflict":
            name = work.state.release
            text = f"it conflicts, and {name}'s series is recorded without it"
            yield StepOutcome(slug, "left", text, carried.clashes, carried.files)
            continue
        outcome = StepOutcome(
            slug,
            "waits" if waits else carried.verdict,
            "it changes files of a step that is open" if waits else carried.evidence,
            () if waits else carried.clashes,
            carried.files,
            tentative=waits or conflicting is not None,
        )
        yield outcome
        if outcome.outcome in OPEN:
            open_paths |= set(tree.changed)
            conflicting = conflicting or tree
        elif carried.tree is not None and carried.verdict != "upstream":
            head = carry.commit(carried.form, carried.tree, head)
            if not outcome.tentative:
                work.git.reset(head)
    if conflicting is not None:
        leave_conflict(
            work, conflicting, needed_kernels(carry.project, conflicting.step)
        )


def _settled(work: Work, carry: Carrier, tree: StepTree, commit: str) -> StepOutcome:
    """The outcome of a step whose commit an earlier run, or a person, made."""
    done = carry.carry(tree, f"{commit}^")
    # A variant that is called after the release is what a person made of it.
    own = done.form.path.stem == work.state.release
    verdict, text = done.verdict, done.evidence
    if done.tree != work.git.tree_of(commit) or own:
        return StepOutcome(tree.slug, "resolved", "by hand", done.clashes, done.files)
    return StepOutcome(tree.slug, verdict, text, done.clashes, done.files)


def _require_own(project: Project, release: Release, stale: list[StaleFile]) -> None:
    """Require that a refresh writes only files of its own release, and patches.

    Raises:
        UsageError: the work repository holds older kernels or overlay files.
    """
    own = (project.series_dir(release.name), project.overlay / release.name)
    others = [
        str(file.path)
        for file in stale
        if not any((project.root / file.path).is_relative_to(place) for place in own)
        if file.path.name == TREES or file.path.parts[0] != project.patches.name
    ]
    if others:
        raise UsageError(
            "kernels or overlay changed since the steps were carried, or were"
            " changed in the work repository",
            release=release.name,
            detail=others,
            hint="the same command with a new --to DIR",
        )


def _write(
    project: Project, cache: Cache, release: Release, work: Work, done: RefreshReport
) -> list[StaleFile]:
    """Pin and save, without those steps that an earlier run wrote and that are left
    behind now. If the series cannot be saved, undo the pin."""
    before = project.releases_file.read_bytes()
    if release.name not in releases.load(project):
        add(project, release)
    gone = {step.step for step in done.steps if step.outcome in ("dropped", "upstream")}
    kept = commits_of(work)
    drop = [slug for slug in read_order(project, release.name) if slug not in kept]
    try:
        cache.progress(f"writing the series of {release.name}")
        return save(
            project,
            cache,
            work.git.work_tree,
            drop=[slug for slug in drop if slug in gone],
            alone=True,
            check=functools.partial(_require_own, project, release),
        )
    except BaseException:
        with atomic_file(project.releases_file) as file:
            file.write(before)
        raise
