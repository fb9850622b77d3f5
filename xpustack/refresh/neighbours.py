# SPDX-License-Identifier: Apache-2.0
"""Which release a series is carried from, and which releases have none yet."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from xpustack.base import releases
from xpustack.base.index import PipConfiguration
from xpustack.base.releases import Release
from xpustack.core.cache import Cache
from xpustack.core.errors import UsageError
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.refresh.refresh import RefreshReport, refresh, target_release
from xpustack.refresh.work import noted_source
from xpustack.series.order import read_order


@dataclass(frozen=True)
class Source:
    """The release `name` to carry from, and the reason `why` in one line."""

    name: str
    why: str


@dataclass(frozen=True)
class MissingRelease:
    """The newest patch release of a minor, which is not pinned. `pinned` is the pin of
    that minor, if there is one."""

    version: str
    pinned: str | None = None


def neighbours(pinned: Iterable[Release], version: str) -> list[Release]:
    """The pins before and after a version, those that there are; never itself."""
    wanted = Version(version)
    ordered = sorted(pinned, key=lambda release: Version(release.version))
    before = [release for release in ordered if Version(release.version) < wanted]
    after = [release for release in ordered if Version(release.version) > wanted]
    return before[-1:] + after[:1]


def choose_source(
    project: Project,
    cache: Cache,
    name: str,
    *,
    directory: Path | None = None,
    drop: tuple[str, ...] = (),
    offline: bool = False,
    progress: Progress = silent,
) -> Source:
    """The pinned neighbour of release `name` whose series carries over with fewer
    conflicts, found by carrying both in temporary repositories.

    On a tie: the one with fewer steps that wait for a decision, then the one with fewer
    merged steps, then the older one. A `directory` of an earlier run keeps its source.

    Raises:
        UsageError: no neighbour has a series, or a step of `drop` is in none.
        StackError: as `refresh`.
    """
    if directory is not None and (source := noted_source(directory)) is not None:
        return Source(source, f"{directory} carries from there")
    release = target_release(project, cache, name, offline=offline, progress=progress)
    candidates = [
        neighbour
        for neighbour in neighbours(releases.load(project), release.version)
        if read_order(project, neighbour.name)
    ]
    if not candidates:
        raise UsageError(
            "neither neighbouring pinned release has a series to carry",
            release=release.name,
            path=project.releases_file,
            hint=f"xpustack refresh {release.name} --from RELEASE",
        )
    if len(candidates) == 1:
        return Source(candidates[0].name, "the only pinned neighbour with a series")
    tried = []
    for candidate in candidates:
        slugs = read_order(project, candidate.name)
        known = tuple(slug for slug in drop if slug in slugs)
        tried.append(
            refresh(
                project,
                cache,
                release.name,
                candidate.name,
                drop=known,
                offline=offline,
                progress=progress,
            )
        )
    best, other = sorted(tried, key=_cost)
    return Source(best.source, f"{_figures(best)}; {_figures(other)}")


def missing_releases(
    project: Project, *, progress: Progress = silent
) -> list[MissingRelease]:
    """The newest patch release of every minor on the index that is not pinned, from the
    oldest pinned minor on, oldest first.

    Raises:
        EnvironmentProblem: the index cannot be reached.
    """
    return missing_among(releases.load(project), final_releases(progress))


def missing_among(
    pins: Iterable[Release], offered: Iterable[Version]
) -> list[MissingRelease]:
    """As `missing_releases`, for the versions that an index offers, oldest first."""
    pinned = {Version(release.version): release.name for release in pins}
    if not pinned:
        return []
    by_minor = {version.release[:2]: name for version, name in sorted(pinned.items())}
    newest: dict[tuple[int, ...], Version] = {}
    for version in offered:
        newest[version.release[:2]] = version
    first = min(by_minor)
    return [
        MissingRelease(f"v{version}", by_minor.get(minor))
        for minor, version in sorted(newest.items())
        if minor >= first and not any(pin >= version for pin in _of(pinned, minor))
    ]


def final_releases(progress: Progress = silent) -> list[Version]:
    """The final releases on the index that are not yanked, oldest first.

    Raises:
        EnvironmentProblem: the index cannot be reached.
    """
    progress("asking the index")
    offered = {
        Version(package.version or "0")
        for package in PipConfiguration.of_this_machine().index().archives()
        if not package.link.is_yanked
    }
    return sorted(version for version in offered if not version.is_prerelease)


def _of(pinned: Iterable[Version], minor: tuple[int, ...]) -> list[Version]:
    return [version for version in pinned if version.release[:2] == minor]


def _count(done: RefreshReport, outcome: str) -> int:
    return sum(step.outcome == outcome for step in done.steps)


def _cost(done: RefreshReport) -> tuple[int, int, int, Version]:
    return (
        _count(done, "conflict"),
        _count(done, "waits"),
        _count(done, "merged"),
        Version(done.source.removeprefix("v")),
    )


def _figures(done: RefreshReport) -> str:
    conflicts, waits = _count(done, "conflict"), _count(done, "waits")
    noun = "conflict" if conflicts == 1 else "conflicts"
    waiting = f", {waits} waiting" if waits else ""
    return f"{done.source}: {conflicts} {noun}{waiting}"
