# SPDX-License-Identifier: Apache-2.0
"""Adds a vLLM release to `releases.toml` from what its own archive says."""

import bisect
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from xpustack.base.archive import members
from xpustack.base.dockerfile import instructions
from xpustack.base.download import download, keep
from xpustack.base.index import PROJECT, Index, PipConfiguration, described
from xpustack.base.releases import Pin, Release, load, parse
from xpustack.core.cache import Cache, atomic_file
from xpustack.core.errors import SourceError, UsageError, concerning
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project

REQUIREMENTS = "requirements/xpu.txt"
DOCKERFILE = "docker/Dockerfile.xpu"
_HEADER = re.compile(r"\s*\[\[\s*release\s*\]\]")


def pin(
    project: Project,
    cache: Cache,
    version: str,
    progress: Progress | None = None,
) -> Release:
    """Find `version` on the index, hash it, read what it runs with, and write
    the new entry into `releases.toml`, which is otherwise left as it is.

    Raises:
        UsageError: not a version, pinned already, or not on the index.
        SourceError: the archive is not what its index announces, or it does not
            name torch, Triton and vllm-xpu-kernels.
        EnvironmentProblem: the index cannot be reached, or the disk is full.
    """
    version = _normal(version)
    with concerning(f"v{version}"), cache.lock("pin", progress):
        if f"v{version}" in load(project):
            raise UsageError(
                "this release is pinned already",
                path=project.releases_file,
                hint="xpustack status",
            )
        release = candidate(cache, version, progress)
        add(project, release)
    return release


def candidate(cache: Cache, version: str, progress: Progress | None = None) -> Release:
    """The entry that `pin` would write for `version`; its archive is then in the
    cache.

    Raises:
        StackError: as `pin`.
    """
    report = progress or silent
    version = _normal(version)
    sdist, sha256 = _obtain(version, cache, report)
    report(f"reading {sdist.name}")
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
    """Write the entry of a release that is not pinned into `releases.toml`."""
    before = project.releases_file.read_text(encoding="utf-8")
    after = inserted(before, release)
    parse(after, project.releases_file)
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
    wanted = {
        "torch": ("torch",),
        "Triton": ("triton", "triton-xpu"),
        "vllm-xpu-kernels": ("vllm-xpu-kernels",),
    }
    found = {title: named(texts, names) for title, names in wanted.items()}
    missing = [title for title, place in found.items() if place is None]
    torch, triton, xpu_kernels = found.values()
    if torch is None or triton is None or xpu_kernels is None:
        raise SourceError(
            f"the base names no exact version of {', '.join(missing)}",
            release=release,
            path=sdist,
            detail=[f"looked in {REQUIREMENTS} and {DOCKERFILE}"],
            hint=f"tar -xzOf {shlex.quote(str(sdist))} --wildcards '*/{REQUIREMENTS}'",
        )
    return torch, triton, xpu_kernels


def named(texts: Mapping[str, str], names: tuple[str, ...]) -> Pin | None:
    """The exact version of the first of `names` that a file of the base asks
    for. The requirements come first; the Dockerfile's word stands where they
    are silent. Of `names` the first is the usual one, which a pin leaves out."""
    for line in texts.get(REQUIREMENTS, "").splitlines():
        found = _required(line, names)
        if found:
            name, version = found
            return Pin(version, REQUIREMENTS, "" if name == names[0] else name)
    alternatives = "|".join(map(re.escape, names))
    install = re.compile(rf"(?<![\w.-])({alternatives})==([\w.+]+)")
    place = install.search(instructions(texts.get(DOCKERFILE, "")))
    if place is None:
        return None
    return Pin(place[2], DOCKERFILE, "" if place[1] == names[0] else place[1])


def inserted(text: str, release: Release) -> str:
    """`text` of a `releases.toml` with an entry for `release` in version order;
    all else, comments included, stays byte for byte."""
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    for start in starts:
        own = re.search(
            r'^\s*version\s*=\s*["\']([^"\']+)', "".join(lines[start:]), re.M
        )
        if own and Version(own[1]) > Version(release.version):
            # Comment lines right above an entry belong to it.
            while start and lines[start - 1].lstrip().startswith("#"):
                start -= 1
            return (
                "".join(lines[:start]) + entry(release) + "\n" + "".join(lines[start:])
            )
    head = text if not text or text.endswith("\n") else text + "\n"
    return head + ("\n" if head.strip() else "") + entry(release)


def entry(release: Release) -> str:
    """The lines of `releases.toml` that stand for `release`."""
    lines = [
        "[[release]]",
        f'version = "{release.version}"',
        f'sdist = "{release.sdist}"',
        f'sha256 = "{release.sha256}"',
        f"revision = {release.revision}",
    ]
    for key in ("torch", "triton", "xpu_kernels"):
        one: Pin = getattr(release, key)
        name = f'name = "{one.name}", ' if one.name else ""
        where = f'version = "{one.version}", file = "{one.file}"'
        lines.append(f"{key} = {{ {name}{where} }}")
    return "\n".join(lines) + "\n"


def _normal(version: str) -> str:
    try:
        return str(Version(version))
    except InvalidVersion:
        raise UsageError(
            f"{version!r} is not a version", hint="xpustack pin 0.24.0"
        ) from None


def _obtain(version: str, cache: Cache, progress: Progress) -> tuple[Path, str]:
    """Download the archive of `version` into the cache."""
    index = PipConfiguration.of_this_machine().index()
    progress(f"looking for {PROJECT} {version}")
    packages = index.archives(version)
    if not packages:
        raise _unknown(version, index)
    link = packages[0].link
    if link.is_yanked:
        progress(f"{link.filename} was yanked: {link.yank_reason or 'no reason given'}")
    progress(f"downloading {described(link)}")
    with cache.scratch() as directory:
        file, actual = download(link, directory, client=index.client, progress=progress)
        announced = (link.hash_option or {}).get("sha256", [actual])
        if actual not in announced:
            raise SourceError(
                "the downloaded archive is not the one that the index announces",
                release=f"v{version}",
                path=link.filename,
                detail=[
                    f"announced sha256 {announced[0]}",
                    f"actual sha256    {actual}",
                ],
                hint=f"xpustack pin {version}",
            )
        return keep(file, actual, cache), actual


def _unknown(version: str, index: Index) -> UsageError:
    finals = {Version(package.version or "0") for package in index.archives()}
    offered = sorted(each for each in finals if not each.is_prerelease)
    place = bisect.bisect(offered, Version(version))
    near = [str(each) for each in reversed(offered[max(place - 1, 0) : place + 1])]
    return UsageError(
        f"{PROJECT} {version} has no source archive on pip's indexes",
        release=f"v{version}",
        detail=[f"nearest: {', '.join(near)}"] if near else None,
        hint=f"xpustack pin {near[-1]}" if near else "python -m pip config list",
    )


def _required(line: str, names: tuple[str, ...]) -> tuple[str, str] | None:
    """The name and the exact version that a requirement line asks for, if it is
    one of `names`: after `==`, or in the name of the wheel that it points to."""
    try:
        requirement = Requirement(line.partition(" #")[0].strip())
    except InvalidRequirement:
        return None
    name = canonicalize_name(requirement.name)
    if name not in names:
        return None
    if requirement.url:
        try:
            wheel = requirement.url.rpartition("/")[2]
            return name, str(parse_wheel_filename(wheel)[1])
        except InvalidWheelFilename:
            return None
    exact = [each.version for each in requirement.specifier if each.operator == "=="]
    return (name, exact[0]) if exact else None
