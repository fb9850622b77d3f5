# SPDX-License-Identifier: Apache-2.0
"""Watch upstream: releases without a pin, newer kernels, models without an XPU path,
and steps that upstream has by now."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.version import Version

from stack.base import releases
from stack.base.download import base_of
from stack.base.index import PROJECT, PipConfiguration
from stack.base.releases import Release, Releases
from stack.base.store import Store
from stack.core.cache import Cache
from stack.core.errors import SeriesError, SourceError
from stack.core.project import Project
from stack.core.repository import Repository
from stack.refresh.carry import Carrier
from stack.refresh.refresh import target_release
from stack.series.apply import trees_before_failure
from stack.series.order import read_order
from stack.series.tree import Series

KERNELS = "vllm-xpu-kernels"
SCHEMAS = "standins/emulated_xpu/schemas"
"""The op schemas of each version that somebody read."""
_BACKPORT = "Backport"
_MODELS = "vllm/models"
_PLATFORMS = ("nvidia", "amd")
_REFUSAL = re.compile(r"is_xpu\(\):\n\s+raise\b")


@dataclass(frozen=True)
class MissingRelease:
    """The newest patch release of a minor, which is not pinned. `pinned` is the pin of
    that minor, if there is one."""

    version: str
    pinned: str | None = None


@dataclass(frozen=True)
class NewerKernels:
    """A pin's version of vllm-xpu-kernels, and a newer one on the index.

    `known` marks one that needs no action. An older release goes on asking for its
    own version. What is newer than the newest pin's is known once its op schemas are
    in `standins/emulated_xpu/schemas`: the next release will ask for it or for its
    successor.
    """

    release: str
    pinned: str
    newer: str
    known: bool


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
class ModelWithoutXpu:
    """A model of a release that has no path for XPU, though the pin before that release
    lacks the model or has such a path."""

    release: str
    model: str
    why: str


@dataclass(frozen=True)
class WatchReport:
    """What upstream has and this stack has not.

    Attributes:
        newer: the final releases on the index after the newest pin, oldest first.
        gaps: the newest release of each minor between two pins that has no pin.
        patches: newer patch releases of pinned minors.
        kernels: newer versions of vllm-xpu-kernels.
        compared: the release with which all older series were compared: the newest of
            `newer`, else the newest pin.
        models: models of `compared` that came without an XPU path.
        landed: steps of pinned releases that `compared` has.
    """

    newest_pin: str
    newer: tuple[str, ...]
    gaps: tuple[MissingRelease, ...]
    patches: tuple[MissingRelease, ...]
    kernels: tuple[NewerKernels, ...]
    compared: str
    models: tuple[ModelWithoutXpu, ...]
    landed: tuple[LandedStep, ...]

    @property
    def news(self) -> bool:
        """Whether there is something to do. Models alone are no news: those of a
        release without a pin come with that release."""
        return (
            bool(self.newer or self.gaps or self.patches)
            or any(not step.known for step in self.landed)
            or any(not kernels.known for kernels in self.kernels)
        )


def watch(project: Project, cache: Cache) -> WatchReport:
    """Compare the pins with the index, and the series with the newest release.

    Offline it looks at the pinned releases alone.

    Raises:
        SourceError: an archive cannot be fetched, or nothing is pinned.
        EnvironmentProblem: the index cannot be reached.
    """
    stack = releases.load(project)
    pinned = list(stack)
    newest = stack.newest
    offered: list[Version] = []
    kernels: tuple[NewerKernels, ...] = ()
    if not cache.offline:
        cache.progress("asking the index")
        index = PipConfiguration.of_this_machine().index()
        offered = index.final_versions(PROJECT)
        versions = index.final_versions(KERNELS)
        kernels = tuple(newer_kernels(pinned, versions, project.root))
    newer = [str(version) for version in offered if version > Version(newest.version)]
    missing = missing_among(stack, offered)
    compared = newest
    if newer:
        compared = target_release(project, cache, f"v{newer[-1]}")
    store = Store(cache)
    base = base_of(store, compared)
    older: list[Series] = []
    for release in pinned:
        with contextlib.suppress(SourceError, SeriesError):
            if release.name != compared.name:
                older.append(trees_before_failure(store, project, release))
    models = _models(store, pinned, compared)
    landed: list[LandedStep] = []
    carried: list[str] | None = None
    if compared in pinned:
        carried = read_order(project, compared.name)
    with store.writing() as writer, store.cache.scratch() as scratch:
        for series in older:
            old = series.base
            cache.progress(f"comparing {old.release.name} with {compared.name}")
            carry = Carrier(project, writer.directory, scratch, old.commit, base.id)
            landed += _landed(carry, series, compared.name, carried)
    return WatchReport(
        newest_pin=newest.name,
        newer=tuple(newer),
        gaps=tuple(
            item
            for item in missing
            if item.pinned is None and item.version.removeprefix("v") not in newer
        ),
        patches=tuple(item for item in missing if item.pinned is not None),
        kernels=kernels,
        compared=compared.name,
        models=tuple(models),
        landed=tuple(landed),
    )


def missing_among(pins: Releases, offered: Iterable[Version]) -> list[MissingRelease]:
    """The newest patch release of every minor on an index that is not pinned, from the
    oldest pinned minor on, oldest first, without the minors that are retired.

    Args:
        offered: the versions that the index has, oldest first.
    """
    retired = {release.minor for release in pins.retired}
    pinned = {Version(release.version): release.name for release in pins}
    by_minor = {version.release[:2]: name for version, name in sorted(pinned.items())}
    newest: dict[tuple[int, ...], Version] = {}
    for version in offered:
        newest[version.release[:2]] = version
    first = min(by_minor)
    return [
        MissingRelease(f"v{version}", by_minor.get(minor))
        for minor, version in sorted(newest.items())
        if minor >= first
        and (minor in by_minor or minor not in retired)
        and not any(pin >= version for pin in pinned if pin.release[:2] == minor)
    ]


def _models(
    store: Store, pinned: Sequence[Release], compared: Release
) -> Iterator[ModelWithoutXpu]:
    """The models without an XPU path that are new in a release."""
    newest = Version(compared.version)
    older = [release for release in pinned if Version(release.version) < newest]
    known: set[str] = set()
    for release in older[-1:]:
        base = base_of(store, release)
        known |= models_without_xpu(store.git, base.id).keys()
    base = base_of(store, compared)
    for model, why in models_without_xpu(store.git, base.id).items():
        if model not in known:
            yield ModelWithoutXpu(compared.name, model, why)


def _landed(
    carry: Carrier, series: Series, newer: str, carried: list[str] | None
) -> Iterator[LandedStep]:
    """The steps of a series that the base of `newer` has. `carried` are the steps that
    this stack has for it, None if it is not pinned."""
    for tree in series.steps:
        step = carry.merge(tree, carry.new_base)
        if step.verdict == "upstream":
            known = tree.step.trailers.upstream_status.startswith(_BACKPORT) or (
                carried is not None and tree.slug not in carried
            )
            yield LandedStep(tree.release.name, tree.slug, newer, step.evidence, known)


def newer_kernels(
    pins: Sequence[Release], offered: Iterable[Version], root: Path
) -> Iterator[NewerKernels]:
    """One row for each pin whose vllm-xpu-kernels has a newer fix release (the first
    three numbers are equal), and for the newest pin whatever is newer.

    Args:
        pins: oldest first, at least one.
        offered: the versions on the index.
        root: this repository.
    """
    versions = sorted(offered)
    for release in pins:
        own = Version(release.xpu_kernels.version)
        newest_pin = release is pins[-1]
        newer = [
            version
            for version in versions
            if version > own and (newest_pin or version.release[:3] == own.release[:3])
        ]
        for version in newer[-1:]:
            read = (root / SCHEMAS / f"{version}.txt").is_file()
            known = read or not newest_pin
            yield NewerKernels(release.name, str(own), str(version), known)


def models_without_xpu(git: Repository, tree: str) -> dict[str, str]:
    """The models below `vllm/models` that have a folder of another platform, and whose
    `__init__.py`, which chooses among the platforms, does not offer XPU one.

    Returns:
        The reason by the model's name.
    """
    files = git.files(tree, [_MODELS])
    isolated = {
        path.parts[2]
        for path in map(PurePosixPath, files)
        if len(path.parts) > 4 and path.parts[3] in _PLATFORMS
    }
    entries = {name: files.get(f"{_MODELS}/{name}/__init__.py") for name in isolated}
    blobs = git.blobs(entry.blob for entry in entries.values() if entry is not None)
    found = {}
    for name, entry in sorted(entries.items()):
        text = blobs[entry.blob].decode("utf-8", "replace") if entry is not None else ""
        if "xpu" not in text.lower():
            found[name] = "its __init__.py does not name XPU"
        elif _REFUSAL.search(text):
            found[name] = "its __init__.py refuses XPU"
    return found
