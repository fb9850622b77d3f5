# SPDX-License-Identifier: Apache-2.0
"""Adds a vLLM release to `releases.toml`, with the dependencies that it names."""

import bisect
import contextlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from stack.base.archive import members
from stack.base.dockerfile import (
    DOCKERFILE,
    REQUIREMENTS,
    instructions,
    requirements,
)
from stack.base.download import download
from stack.base.index import PROJECT, Index, PipConfiguration
from stack.base.releases import (
    Pin,
    Release,
    Releases,
    Retired,
    is_version,
    load,
    parse_releases,
)
from stack.core.cache import Cache, atomic_file
from stack.core.errors import SourceError, UsageError, concerning
from stack.core.project import Project


def pin(project: Project, cache: Cache, version: str) -> Release:
    """Download the archive of `version`, hash it, read its dependencies, and write a
    new entry into `releases.toml`. The rest of that file stays as it is.

    Raises:
        UsageError: `version` is no version, is pinned already, or is not on the
            index.
        SourceError: the archive is not what its index announces, or it does not
            name torch, Triton and vllm-xpu-kernels.
        EnvironmentProblem: the index cannot be reached, or the disk is full.
    """
    version = _normal(version)
    with concerning(f"v{version}"), cache.lock("pin"):
        pinned = load(project)
        if pinned.has_version(version):
            raise UsageError(
                "this release is pinned already",
                path=project.releases_file,
                hint="xpustack status",
            )
        release = candidate(cache, version, pinned)
        add(project, release)
    return release


def candidate(cache: Cache, version: str, pinned: Releases) -> Release:
    """The entry that `pin` would write for `version`. The archive is downloaded into
    the cache.

    Args:
        pinned: what there is already, which no error suggests to pin.

    Raises:
        StackError: as `pin`.
    """
    version = _normal(version)
    sdist, sha256 = _obtain(version, cache, pinned)
    # An index takes 1.0 for 1.0.0; the archive has upstream's own form.
    version = str(parse_sdist_filename(sdist.name)[1])
    cache.progress(f"reading {sdist.name}")
    torch, triton, xpu_kernels = dependencies(sdist, f"v{version}")
    return Release(
        version=version,
        sdist=sdist.name,
        sha256=sha256,
        revision=1,
        torch=torch,
        triton=triton,
        xpu_kernels=xpu_kernels,
    )


def add(project: Project, release: Release) -> None:
    """Write an entry for a new release into `releases.toml`."""
    before = project.releases_file.read_text(encoding="utf-8")
    after = with_entry(before, release)
    parse_releases(after, project.releases_file)
    with atomic_file(project.releases_file) as file:
        file.write(after.encode())


def dependencies(sdist: Path, release: str) -> tuple[Pin, Pin, Pin]:
    """torch, Triton and vllm-xpu-kernels as the archive's own files name them.

    Raises:
        SourceError: one of them is not named with an exact version.
    """
    texts = {
        member.path: member.data.decode(errors="replace")
        for member in members(sdist, release=release)
        if member.path in (REQUIREMENTS, DOCKERFILE)
    }
    names_by_title = {
        "torch": ("torch",),
        "Triton": ("triton", "triton-xpu"),
        "vllm-xpu-kernels": ("vllm-xpu-kernels",),
    }
    pins = {title: find_pin(texts, names) for title, names in names_by_title.items()}
    missing = [title for title, dependency in pins.items() if dependency is None]
    torch, triton, xpu_kernels = pins.values()
    if torch is None or triton is None or xpu_kernels is None:
        raise SourceError(
            f"the base names no exact version of {', '.join(missing)}",
            release=release,
            path=sdist,
            detail=[f"looked in {REQUIREMENTS} and {DOCKERFILE}"],
            hint=f"tar -xzOf {shlex.quote(str(sdist))} --wildcards '*/{REQUIREMENTS}'",
        )
    return torch, triton, xpu_kernels


def find_pin(texts: Mapping[str, str], names: tuple[str, ...]) -> Pin | None:
    """The pin of a dependency: the exact version that the requirements ask for, else
    the one in the Dockerfile.

    Args:
        texts: the files of the base, by path.
        names: the distribution's possible names; a pin leaves the first, usual one
            out.
    """
    for requirement in requirements(texts.get(REQUIREMENTS, "")):
        name, version = canonicalize_name(requirement.name), _version(requirement)
        if name in names and version:
            return Pin(version, REQUIREMENTS, "" if name == names[0] else name)
    alternatives = "|".join(map(re.escape, names))
    install = re.compile(rf"(?<![\w.-])({alternatives})==([\w.+]+)")
    match = install.search(instructions(texts.get(DOCKERFILE, "")))
    if match is None:
        return None
    return Pin(match[2], DOCKERFILE, "" if match[1] == names[0] else match[1])


def with_entry(text: str, release: Release) -> str:
    """The text of a `releases.toml` with an entry for `release`: in place of the one
    that it has, or a new one in version order. Its paragraphs, of which one holds an
    entry and the comments above it, stay byte for byte."""
    paragraphs = list(filter(None, text.strip("\n").split("\n\n")))
    place, notes = len(paragraphs), ""
    for number, paragraph in enumerate(paragraphs):
        if "[[retired]]" in paragraph:
            place = number
            break
        version = re.search(r'(?m)^version = "(.+)"', paragraph)
        if version and Version(version[1]) >= Version(release.version):
            place = number
            if version[1] == release.version:
                notes = paragraphs.pop(number).partition("[[release]]")[0]
            break
    paragraphs.insert(place, notes + release_entry(release).rstrip("\n"))
    return "\n\n".join(paragraphs) + "\n"


def without_entry(text: str, retired: Retired) -> str:
    """The text of a `releases.toml` in which the release's entry is gone, and which
    lists it among the retired ones, in version order."""
    paragraphs = list(filter(None, text.strip("\n").split("\n\n")))
    own = f'\nversion = "{retired.version}"\n'
    place = len(paragraphs) - 1
    kept: list[str] = []
    for paragraph in paragraphs:
        version = re.search(r'(?m)^version = "(.+)"', paragraph)
        if "[[release]]" in paragraph and own in paragraph:
            continue
        later = version is not None and Version(version[1]) > Version(retired.version)
        if "[[retired]]" in paragraph and later:
            place = min(place, len(kept))
        kept.append(paragraph)
    entry = f'[[retired]]\nversion = "{retired.version}"\ncommit = "{retired.commit}"'
    kept.insert(place, entry)
    return "\n\n".join(kept) + "\n"


def release_entry(release: Release) -> str:
    """The entry of a release in `releases.toml`."""
    lines = ["[[release]]"]
    for key in ("version", "sdist", "sha256", "revision", "content", "kept"):
        value = getattr(release, key)
        text = str(value) if isinstance(value, int) else f'"{value}"'
        lines += [f"{key} = {text}"] if value else []
    for key in ("torch", "triton", "xpu_kernels"):
        dependency: Pin = getattr(release, key)
        name = f'name = "{dependency.name}", ' if dependency.name else ""
        version = f'version = "{dependency.version}", file = "{dependency.file}"'
        lines.append(f"{key} = {{ {name}{version} }}")
    return "\n".join(lines) + "\n"


def _normal(version: str) -> str:
    if not is_version(version):
        raise UsageError(f"{version!r} is not a version", hint="xpustack pin 0.34.0")
    return str(Version(version))


def _obtain(version: str, cache: Cache, pinned: Releases) -> tuple[Path, str]:
    """Download the archive of `version` into the cache."""
    index = PipConfiguration.of_this_machine().index()
    cache.progress(f"looking for {PROJECT} {version}")
    packages = index.packages(f"{PROJECT}=={version}")
    if not packages:
        raise _no_archive(version, index, pinned)
    link = packages[0].link
    if link.is_yanked:
        why = link.yank_reason or "no reason given"
        cache.progress(f"{link.filename} was yanked: {why}")
    announced = next(iter((link.hash_option or {}).get("sha256", ())), None)
    file, actual = download(link, cache, index.client, announced)
    if file is None:
        raise SourceError(
            "the downloaded archive is not the one that the index announces",
            release=f"v{version}",
            path=link.filename,
            detail=[f"announced sha256 {announced}", f"actual sha256    {actual}"],
            hint=f"xpustack pin {version}",
        )
    return file, actual


def _no_archive(version: str, index: Index, pinned: Releases) -> UsageError:
    offered = index.final_versions(PROJECT)
    place = bisect.bisect(offered, Version(version))
    neighbours = offered[max(place - 1, 0) : place + 1]
    nearest = [str(neighbour) for neighbour in reversed(neighbours)]
    new = [each for each in reversed(nearest) if not pinned.has_version(each)]
    if new:
        hint = f"xpustack pin {new[0]}"
    elif nearest:
        hint = "xpustack watch, which names the releases without a pin"
    else:
        hint = "python -m pip config list"
    newest = f"; upstream has nothing newer than v{offered[-1]}" if offered else ""
    return UsageError(
        f"{PROJECT} {version} has no source archive on pip's indexes"
        + (newest if place == len(offered) else ""),
        release=f"v{version}",
        detail=[f"nearest: {', '.join(nearest)}"] if nearest else None,
        hint=hint,
    )


def _version(requirement: Requirement) -> str | None:
    """The exact version in a requirement: that after `==`, or that in the file name of
    the wheel it points to."""
    if requirement.url:
        with contextlib.suppress(InvalidWheelFilename):
            return str(parse_wheel_filename(requirement.url.rpartition("/")[2])[1])
    exact = (each.version for each in requirement.specifier if each.operator == "==")
    return next(exact, None)
