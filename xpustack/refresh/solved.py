# SPDX-License-Identifier: Apache-2.0
"""A conflict that another pinned release has solved.

Nothing is recorded beside the patches: the series of a release that had the same
conflict is its solution, reviewed and tested. Where upstream's lines are the same on
both releases, that release's form of the step merges onto the new one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.version import Version

from xpustack.base import releases
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.errors import StackError
from xpustack.core.progress import Progress
from xpustack.core.project import Project
from xpustack.core.repository import Repository
from xpustack.refresh.carry import Carrier
from xpustack.refresh.work import StepOutcome
from xpustack.series.apply import trees
from xpustack.series.order import read_order
from xpustack.series.worktree import BRANCH, Work, link_objects


@dataclass(frozen=True)
class Solution:
    """The content of the files in conflict, as the step of `release` makes them."""

    release: str
    files: Mapping[str, bytes]


def solution(
    project: Project,
    store: Store,
    work: Work,
    carry: Carrier,
    source: str,
    conflict: StepOutcome,
    *,
    offline: bool,
    progress: Progress,
) -> Solution | None:
    """How a pinned release has solved a conflict; None if none has.

    Of several the release nearest to that of `work`.

    Args:
        source: the release that the step is carried from.
        conflict: with the steps of `work` so far.
    """
    slug = conflict.step
    paths = {clash.path for clash in conflict.clashes}
    for other in _others(project, work.state.release, source, slug):
        try:
            series = trees(store, project, other, offline=offline, progress=progress)
        except StackError:
            continue
        tree = next(tree for tree in series.steps if tree.slug == slug)
        if not paths <= set(tree.changed):
            continue
        link_objects(store, work.git)
        commit = carry.again(tree.commit, work.git.commit_of(BRANCH))
        if commit is not None and (files := _contents(carry.git, commit, paths)):
            return Solution(other.name, files)
    return None


def _others(project: Project, target: str, source: str, slug: str) -> Iterator[Release]:
    """The pins that have the step, the nearest to `target` first."""
    pinned = {release.name: release for release in releases.load(project)}
    order = sorted({*pinned, target}, key=Version)
    place = order.index(target)
    for name in sorted(pinned, key=lambda name: abs(order.index(name) - place)):
        if name not in (target, source) and slug in read_order(project, name):
            yield pinned[name]


def _contents(git: Repository, commit: str, paths: set[str]) -> dict[str, bytes]:
    """The files at `paths`; none at all if one is missing."""
    entries = git.files(commit, paths)
    if entries.keys() != paths:
        return {}
    blobs = git.blobs(entry.blob for entry in entries.values())
    return {path: blobs[entry.blob] for path, entry in entries.items()}
