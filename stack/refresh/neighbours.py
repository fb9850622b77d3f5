# SPDX-License-Identifier: Apache-2.0
"""Which release a series is carried from."""

from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from stack.base import releases
from stack.base.clone import UPSTREAM, Clone
from stack.base.download import base_of
from stack.base.releases import Release, Releases
from stack.base.store import Store
from stack.core.errors import UsageError, command
from stack.core.project import Project
from stack.refresh.work import noted_source
from stack.series.order import read_order


@dataclass(frozen=True)
class Source:
    """The release `name` to carry from, and the reason `why` in one line."""

    name: str
    why: str


def neighbours(pinned: Releases, version: str) -> list[Release]:
    """The pins before and after a version, those that there are; never itself."""
    wanted = Version(version)
    before = [release for release in pinned if Version(release.version) < wanted]
    after = [release for release in pinned if Version(release.version) > wanted]
    return before[-1:] + after[:1]


def choose_source(
    project: Project, version: str, directory: Path | None = None
) -> Source:
    """The pinned neighbour of a version whose series is carried over: the one before
    it, else the one after it. A `directory` of an earlier run keeps its source.

    Raises:
        UsageError: no neighbour has a series.
    """
    if directory is not None and (source := noted_source(directory)) is not None:
        return Source(source, f"{directory} carries from there")
    for neighbour in neighbours(releases.load(project), version):
        if read_order(project, neighbour.name):
            return Source(neighbour.name, "the pinned neighbour")
    raise UsageError(
        "neither neighbouring pinned release has a series to carry",
        release=f"v{version}",
        path=project.releases_file,
        hint=f"xpustack refresh v{version} --from RELEASE",
    )


def source_of_clone(
    project: Project, store: Store, clone: Clone, named: str | None = None
) -> Source:
    """The pin whose series a clone gets: the newest, or the one that is named.

    Raises:
        UsageError: there is no such pin, or the clone's commit is nearer to the pin
            before.
        SourceError: a base is unavailable.
    """
    pinned = releases.load(project)
    newest = pinned.newest if named is None else pinned[named]
    place = pinned.names.index(newest.name)
    before = pinned.pinned[place - 1] if place else None
    why = "the newest pin" if newest == pinned.newest else "as asked"
    bases = [
        base_of(store, release) for release in (before, newest) if release is not None
    ]
    distances = [len(clone.view.changes(base.tree, clone.tree)) for base in bases]
    if before is not None and distances[0] < distances[1]:
        fetch = command("git", "-C", clone.place, "fetch", UPSTREAM, "main")
        raise UsageError(
            f"{clone.ref} is older than {newest.name}, {why}: it differs from"
            f" {before.name} in {distances[0]} files, from {newest.name} in"
            f" {distances[1]}",
            path=clone.place,
            hint=f"{fetch}, then --onto {clone.place}:FETCH_HEAD; or the series of"
            f" {before.name}: export {before.name}, refresh --from {before.name}",
        )
    return Source(newest.name, why)
