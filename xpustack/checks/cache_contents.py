# SPDX-License-Identifier: Apache-2.0
"""Lists what the cache holds, and removes what this checkout does not need.

An entry is removed if no pin and no series of the checkout needs it, and if it was not
used for some days: other checkouts may share the cache.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xpustack.base import releases
from xpustack.base.store import Store, base_ref
from xpustack.builds import build
from xpustack.builds.build import build_version
from xpustack.builds.installed import manifest_of
from xpustack.checks.proof import result_keys
from xpustack.core.cache import Cache, writing
from xpustack.core.errors import EnvironmentProblem
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.series.apply import trees

_DAY = 86_400
_FORMER = ("wheels", "mypy")
"""What earlier versions of the tool kept."""
_CONTENTS = "files"
_SCRATCH = "scratch"
_BLOCK = 512


@dataclass(frozen=True)
class Area:
    """One folder of the cache: its entries, and the bytes that they take on disk."""

    name: str
    entries: int
    bytes: int


@dataclass
class Needs:
    """What a checkout needs of the cache.

    Attributes:
        sdists: archives by their sha256.
        bases: bases by their ref.
        builds: installed trees by their key.
        results: stored results by their key.
        commits: bases and steps by their commit's id.
    """

    sdists: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)
    builds: set[str] = field(default_factory=set)
    results: set[str] = field(default_factory=set)
    commits: set[str] = field(default_factory=set)


@contextlib.contextmanager
def in_use(cache: Cache) -> Iterator[None]:
    """Keep `gc` from removing anything of the cache during the block."""
    handle = None
    # A cache that cannot be opened fails when it is written, with a better message.
    with contextlib.suppress(OSError):
        cache.root.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        handle = os.open(cache.root, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def info(cache: Cache) -> list[Area]:
    """The areas of the cache; a file with several names counts in the first."""
    if not cache.root.is_dir():
        return []
    seen: set[tuple[int, int]] = set()
    areas = []
    for folder in sorted(path for path in cache.root.iterdir() if path.is_dir()):
        size = 0
        for status in _statuses(folder):
            inode = (status.st_dev, status.st_ino)
            if inode not in seen:
                seen.add(inode)
                size += status.st_blocks * _BLOCK
        areas.append(Area(folder.name, len(_entries(cache, folder.name)), size))
    return areas


def needs(project: Project, cache: Cache, progress: Progress = silent) -> Needs:
    """What the pins and series of a checkout need of the cache.

    Raises:
        StackError: a series cannot be read or applied, so its needs are unknown.
    """
    store = Store(cache)
    needed = Needs()
    for release in releases.load(project):
        needed.sdists.add(release.sha256)
        needed.bases.add(base_ref(release))
        if base_ref(release) not in store.refs():
            continue
        progress(f"reading {release.name}")
        series = trees(store, project, release, offline=True, progress=progress)
        last = len(series.steps)
        needed.commits |= {tree.commit for tree in series.trees}
        needed.builds |= {
            build.build_key(store, tree, build_version(tree, last))
            for tree in series.trees
        }
        needed.results |= result_keys(project, cache, series)
    return needed


def gc(
    cache: Cache, needed: Needs, *, days: float = 7, dry_run: bool = False
) -> list[Area]:
    """Remove what is not `needed` and was not used for `days`, and what killed runs
    left. A dry run only reports it.

    Returns:
        What was removed, by area. A file that another entry holds, too, frees nothing.

    Raises:
        EnvironmentProblem: another run uses the cache, or writing there is denied.
    """
    if not cache.root.is_dir():
        return []
    with _alone(cache), writing(cache.root):
        oldest = time.time() - days * _DAY
        unneeded = list(_unneeded(cache, needed, oldest))
        unneeded += _unlisted(cache, [path for _, path in unneeded])
        areas = _freed(unneeded)
        if not dry_run:
            for _, path in unneeded:
                _remove(path)
        areas += _refs(cache, needed, dry_run)
    return areas


def _unneeded(cache: Cache, needed: Needs, oldest: float) -> Iterator[tuple[str, Path]]:
    """The entries that are neither needed nor used lately, and those that killed runs
    left, each with its area."""
    names: dict[str, set[str]] = {
        cache.sdists.name: needed.sdists,
        cache.results.name: needed.results,
        **{area: set() for area in _FORMER},
        cache.builds.name: needed.builds,
    }
    for area, keep in names.items():
        for path in _entries(cache, area):
            name = path.stem if area == cache.results.name else path.name
            if name not in keep and path.lstat().st_mtime <= oldest:
                yield area, path
    yield from (
        (_SCRATCH, path) for path in _entries(cache, _SCRATCH) if not _held(path)
    )


def _unlisted(cache: Cache, removed: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """The contents that no installed tree but those `removed` lists or links to, and
    the names of byte code among them. Without hard links, trees hold copies."""
    homes = set(_entries(cache, cache.builds.name)) - set(removed)
    listed = {
        content.sha256
        for home in homes
        for content in (manifest_of(cache, home.name) or {}).values()
    }
    links = _links(removed)
    for path in _entries(cache, _CONTENTS):
        status = path.lstat()
        if path.name not in listed and status.st_nlink - links[_inode(status)] <= 1:
            yield _CONTENTS, path
    for path in _entries(cache, cache.bytecode.name):
        if path.resolve().name not in listed:
            yield cache.bytecode.name, path


def _freed(unneeded: Iterable[tuple[str, Path]]) -> list[Area]:
    """What the removal of entries frees, by area."""
    pairs = list(unneeded)
    links = _links(path for _, path in pairs)
    entries = Counter(area for area, _ in pairs)
    sizes: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    for area, path in pairs:
        for status in _statuses(path):
            inode = _inode(status)
            if inode not in seen and links[inode] >= status.st_nlink:
                seen.add(inode)
                sizes[area] += status.st_blocks * _BLOCK
    return [Area(area, count, sizes[area]) for area, count in entries.items()]


def _refs(cache: Cache, needed: Needs, dry_run: bool) -> list[Area]:
    """Remove the refs of commits that are not needed, and their objects."""
    store = Store(cache)
    stale = [
        ref
        for ref, commit in store.refs().items()
        if commit.id not in needed.commits and ref not in needed.bases
    ]
    if not stale:
        return []
    before = sum(status.st_blocks for status in _statuses(cache.objects))
    if not dry_run:
        with store.writing() as writer:
            writer.drop(stale)
    after = sum(status.st_blocks for status in _statuses(cache.objects))
    return [Area(cache.objects.name, len(stale), (before - after) * _BLOCK)]


@contextlib.contextmanager
def _alone(cache: Cache) -> Iterator[None]:
    """Let nobody else use the cache during the block.

    Raises:
        EnvironmentProblem: another run uses it.
    """
    handle = os.open(cache.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise EnvironmentProblem(
            "another run uses the cache",
            path=cache.root,
            hint="the same command again when that run has ended",
        ) from None
    finally:
        os.close(handle)


def _entries(cache: Cache, area: str) -> list[Path]:
    """The entries of an area: files in folders of two letters, or whatever lies in the
    area itself."""
    pattern = "??/*" if area in (cache.results.name, _CONTENTS) else "*"
    return sorted((cache.root / area).glob(pattern))


def _links(paths: Iterable[Path]) -> Counter[tuple[int, int]]:
    """How many of the given paths, or of those below them, name each inode."""
    return Counter(_inode(status) for path in paths for status in _statuses(path))


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """The status of a file, or of every file below a folder."""
    if not path.is_dir() or path.is_symlink():
        yield path.lstat()
        return
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(folder, name))


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _held(path: Path) -> bool:
    """Whether a running writer holds the lock of a temporary entry."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
