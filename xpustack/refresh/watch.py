# SPDX-License-Identifier: Apache-2.0
"""Watch upstream: newer releases, and steps that upstream has by now."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from xpustack.base import releases
from xpustack.base.releases import Release
from xpustack.base.store import Store, Writer
from xpustack.core.cache import Cache
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.refresh.carry import carrier
from xpustack.refresh.neighbours import final_releases
from xpustack.refresh.refresh import target_release
from xpustack.series.apply import trees_before_failure
from xpustack.series.order import read_order
from xpustack.series.tree import Series

_BACKPORT = "Backport"


@dataclass(frozen=True)
class LandedStep:
    """A step that a newer release has. `known` marks one that needs no action: the
    newer release is pinned and its series lacks the step, or the step's
    Upstream-Status already is `Backport`."""

    release: str
    step: str
    newer: str
    evidence: str
    known: bool


@dataclass(frozen=True)
class WatchReport:
    """The newer releases and landed steps.

    `newer` are the final releases on the index after the newest pin, oldest first;
    `compared` is the release with which all older series were compared.
    """

    newest_pin: str
    newer: tuple[str, ...]
    compared: str
    landed: tuple[LandedStep, ...]

    @property
    def news(self) -> bool:
        """Whether there is something to do."""
        return bool(self.newer) or any(not step.known for step in self.landed)


def watch(
    project: Project,
    cache: Cache,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> WatchReport:
    """Look for newer releases, and for steps that the newest one has.

    Args:
        offline: look at the pinned releases alone.

    Raises:
        SourceError: an archive cannot be fetched, or nothing is pinned.
        EnvironmentProblem: the index cannot be reached.
    """
    pinned = list(releases.load(project))
    newest = pinned[-1]
    newer = [] if offline else list(_newer(newest, progress))
    compared = newest
    if newer:
        compared = target_release(project, cache, f"v{newer[-1]}", progress=progress)
    store = Store(cache)
    base = store.base(compared, offline=offline, progress=progress)
    attempts = {
        release.name: trees_before_failure(
            store, project, release, offline=offline, progress=progress
        )
        for release in pinned
        if release.name != compared.name
    }
    landed: list[LandedStep] = []
    carried: list[str] | None = None
    if compared in pinned:
        carried = read_order(project, compared.name)
    with store.writing(progress) as writer, store.cache.scratch() as scratch:
        for name, (series, _) in attempts.items():
            progress(f"comparing {name} with {compared.name}")
            if series is not None:
                landed += _landed(
                    writer, series, base.id, compared.name, carried, scratch
                )
    return WatchReport(newest.name, tuple(newer), compared.name, tuple(landed))


def _newer(newest: Release, progress: Progress) -> Iterator[str]:
    """The final releases on the index after the newest pin, oldest first."""
    for version in final_releases(progress):
        if version > Version(newest.version):
            yield str(version)


def _landed(
    writer: Writer,
    series: Series,
    onto: str,
    newer: str,
    carried: list[str] | None,
    scratch: Path,
) -> Iterator[LandedStep]:
    """The steps of a series that the base `onto` has. `carried` are the steps that this
    stack has for it, None if it is not pinned."""
    carry = carrier(writer.directory, scratch, series.base.commit, onto)
    for tree in series.steps:
        step = carry.carry(tree, onto)
        if step.verdict == "upstream":
            known = tree.step.trailers.upstream_status.startswith(_BACKPORT) or (
                carried is not None and tree.slug not in carried
            )
            yield LandedStep(tree.release.name, tree.slug, newer, step.evidence, known)
