# SPDX-License-Identifier: Apache-2.0
"""What happened upstream: newer releases, and steps that upstream has by now."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from xpustack.base import releases
from xpustack.base.index import PipConfiguration
from xpustack.base.releases import Release
from xpustack.base.store import Store, Writer
from xpustack.core.cache import Cache
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.refresh.carry import carrier
from xpustack.refresh.refresh import target_release
from xpustack.series.apply import trees_before_failure
from xpustack.series.order import read_order
from xpustack.series.tree import Series

KNOWN = "Backport"


@dataclass(frozen=True)
class Landed:
    """A step that a newer release has. `known` says that it is no news: the newer
    release is pinned and its series lacks the step, or its Upstream-Status is
    `Backport` already."""

    release: str
    step: str
    newer: str
    evidence: str
    known: bool


@dataclass(frozen=True)
class Watched:
    """What a look upstream found.

    `newer` are the final releases on the index after the newest pin, oldest first;
    `compared` is the release with which all older series were compared.
    """

    newest_pin: str
    newer: tuple[str, ...]
    compared: str
    landed: tuple[Landed, ...]

    @property
    def news(self) -> bool:
        """Whether there is something to do."""
        return bool(self.newer) or any(not one.known for one in self.landed)


def watch(
    project: Project,
    cache: Cache,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> Watched:
    """Look for newer releases, and for steps that the newest one has.

    Args:
        offline: look at the pinned releases alone.

    Raises:
        SourceError: an archive cannot be had, or nothing is pinned.
        EnvironmentProblem: the index cannot be reached.
    """
    pinned = list(releases.load(project))
    newest = pinned[-1]
    newer = [] if offline else list(_newer(newest, progress))
    other = newest
    if newer:
        other = target_release(project, cache, f"v{newer[-1]}", progress=progress)
    store = Store(cache)
    base = store.base(other, offline=offline, progress=progress)
    made = {
        release.name: trees_before_failure(
            store, project, release, offline=offline, progress=progress
        )
        for release in pinned
        if release.name != other.name
    }
    landed: list[Landed] = []
    carried: list[str] | None = None
    if other in pinned:
        carried = read_order(project, other.name)
    with store.writing(progress) as writer, store.cache.scratch() as scratch:
        for name, (series, _) in made.items():
            progress(f"comparing {name} with {other.name}")
            if series is not None:
                landed += _landed(writer, series, base.id, other.name, carried, scratch)
    return Watched(newest.name, tuple(newer), other.name, tuple(landed))


def _newer(newest: Release, progress: Progress) -> Iterator[str]:
    """The final releases on the index after the newest pin, oldest first."""
    progress("asking the index")
    offered = {
        Version(package.version or "0")
        for package in PipConfiguration.of_this_machine().index().archives()
        if not package.link.is_yanked
    }
    for version in sorted(offered):
        if version > Version(newest.version) and not version.is_prerelease:
            yield str(version)


def _landed(
    writer: Writer,
    series: Series,
    onto: str,
    newer: str,
    carried: list[str] | None,
    scratch: Path,
) -> Iterator[Landed]:
    """The steps of a series that the base `onto` has, each judged for itself;
    `carried` are the steps that this stack has on it, None if it is not pinned."""
    carry = carrier(writer.directory, scratch, series.base.commit, onto)
    for tree in series.steps:
        found = carry.carry(tree, onto)
        if found.verdict == "upstream":
            known = tree.step.trailers.upstream_status.startswith(KNOWN) or (
                carried is not None and tree.slug not in carried
            )
            yield Landed(tree.release.name, tree.slug, newer, found.evidence, known)
