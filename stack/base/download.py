# SPDX-License-Identifier: Apache-2.0
"""Downloads a release's archive into the cache, and returns only verified archives, or
the base that the store has of one.

A download goes to a scratch directory, is hashed, and only then gets its final
name. An archive in the cache is hashed again each time it is used. If it changed
there, it is neither used nor replaced: a person must find out what changed it.
"""

import hashlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import httpx2
from unearth import Link

from stack.base.index import PROJECT, Index, PipConfiguration, link_label
from stack.base.releases import Release
from stack.base.store import Store, base_ref
from stack.core.cache import Cache, count_as_used, writing
from stack.core.errors import EnvironmentProblem, SourceError, concerning
from stack.core.progress import Progress, at_most_every
from stack.core.repository import Commit

ATTEMPTS = 3
_CHUNK = 1 << 20
_MIB = 1 << 20


def base_of(store: Store, release: Release) -> Commit:
    """The commit of a release's base, downloaded and imported at its first use.

    Raises:
        SourceError: the archive is unavailable or is not the pinned one.
    """
    ref = base_ref(release)
    with concerning(release.name):
        commit = store.commits([ref]).get(ref)
        if commit is not None:
            store.count_as_used(ref)
            return commit
        archive = fetch(release, store.cache)
        with store.writing() as writer:
            if ref not in store.commits([ref]):
                store.cache.progress(f"importing {release.name}")
                writer.import_base(release, archive)
        return store.commits([ref])[ref]


def fetch(release: Release, cache: Cache) -> Path:
    """The release's archive in the cache, downloaded if need be.

    Raises:
        SourceError: the cached archive was changed; or there is none, and
            the cache is offline, or the index does not have the pinned one.
        EnvironmentProblem: the index cannot be reached, or the disk is full.
    """
    target = cache.sdists / release.sha256 / release.sdist
    with concerning(release.name):
        if not target.exists():
            with cache.lock(f"sdist-{release.sha256}"):
                if not target.exists():
                    _download_pinned(release, cache, target)
        _verify(release, target)
    count_as_used(target.parent)
    return target


def download(
    link: Link, cache: Cache, client: httpx2.Client, sha256: str | None
) -> tuple[Path | None, str]:
    """Download `link` into the cache, if its hash is `sha256` or that is None; return
    its place there, None if it was refused, and its hash.

    Raises:
        EnvironmentProblem: the server cannot be reached, or closes the connection
            too early, in each of `ATTEMPTS` attempts; or the disk is full.
    """
    cache.progress(f"downloading {link_label(link)}")
    report = at_most_every(1.0, cache.progress)
    problem: httpx2.HTTPError | None = None
    with cache.scratch() as directory:
        file = directory / link.filename
        for _ in range(ATTEMPTS):
            try:
                actual = _stream(link, file, client, report)
            except httpx2.HTTPError as error:
                problem = error
                continue
            if sha256 not in (None, actual):
                return None, actual
            target = cache.sdists / actual / link.filename
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
            return target, actual
    raise EnvironmentProblem(
        f"cannot download {link_label(link)}",
        detail=[f"{ATTEMPTS} attempts, the last: {problem or 'no answer'}"],
        hint="python -m pip config list",
    ) from problem


def _verify(release: Release, target: Path) -> None:
    with open(target, "rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != release.sha256:
        raise SourceError(
            "the archive in the cache is not the pinned one: it was changed"
            " after it had been verified",
            path=target,
            detail=[f"expected sha256 {release.sha256}", f"actual sha256   {actual}"],
            hint=f"rm {shlex.quote(str(target))}; then the same command again"
            " downloads it anew",
        )


def _download_pinned(release: Release, cache: Cache, target: Path) -> None:
    if cache.offline:
        raise SourceError(
            "the archive is not in the cache, and --offline forbids downloading it",
            path=target,
            hint="the same command without --offline",
        )
    index = PipConfiguration.of_this_machine().index()
    mismatches: list[str] = []
    for link in _links(index, release):
        file, actual = download(link, cache, index.client, release.sha256)
        if file is not None:
            return
        mismatches.append(f"actual sha256   {actual} ({link_label(link)})")
    raise SourceError(
        "the archive on the index differs from the pinned one",
        path=release.sdist,
        detail=[f"expected sha256 {release.sha256}", *mismatches],
        hint="git log -p releases.toml",
    )


def _links(index: Index, release: Release) -> Sequence[Link]:
    """All links to the archive; those that announce the pinned hash come first."""
    links = [
        package.link
        for package in index.packages(f"{PROJECT}=={release.version}")
        if package.link.filename == release.sdist
    ]
    if not links:
        raise SourceError(
            "none of pip's indexes and find-links has the archive",
            path=release.sdist,
            hint="python -m pip config list",
        )
    announced = {"sha256": [release.sha256]}
    return sorted(links, key=lambda link: link.hash_option != announced)


def _stream(link: Link, target: Path, client: httpx2.Client, progress: Progress) -> str:
    digest, received = hashlib.sha256(), 0
    # An encoded body would make Content-Length differ from the file's size.
    headers = {"Accept-Encoding": "identity"}
    with (
        writing(target),
        open(target, "wb") as file,
        client.stream("GET", link.normalized, headers=headers) as response,
    ):
        response.raise_for_status()
        announced = int(response.headers.get("Content-Length", 0))
        for chunk in response.iter_raw(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            received += len(chunk)
            progress(
                f"{link.filename}: {received / _MIB:.0f}"
                + (f" of {announced / _MIB:.0f} MiB" if announced else " MiB")
            )
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
