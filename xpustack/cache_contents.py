# SPDX-License-Identifier: Apache-2.0
"""What the cache holds, and what of it can go.

Everything in the cache can be downloaded or made again: removing costs time only.
"""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from xpustack.build import manifest_of
from xpustack.bytecode import forget, load_index
from xpustack.cache import Cache, writing

DAY = 86400.0
RECENT = DAY
"""How old a content must be at least to go."""
KINDS = {
    "sdists": "downloaded archives",
    "objects": "bases and trees, as a git store",
    "builds": "installed trees",
    "files": "what installed trees hold, once each",
    "bytecode": "which contents are byte code",
    "results": "results of checks",
    "mypy": "mypy's memory",
}
_BLOCK = 512
"""The unit of `st_blocks`."""


@dataclass(frozen=True)
class Part:
    """A folder of the cache: its entries, and the bytes that it takes on disk.

    A file with several names counts in the first part that has it.
    """

    name: str
    meaning: str
    entries: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """What a cache holds: its place, its parts and their bytes together."""

    root: Path
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Removed:
    """What `gc` removed, or would: paths within the cache, and bytes on disk."""

    paths: tuple[str, ...]
    bytes: int


def info(cache: Cache) -> Contents:
    """What the cache holds, largest part first.

    Raises:
        EnvironmentProblem: it cannot be read.
    """
    parts = []
    seen: set[tuple[int, int]] = set()
    with writing(cache.root):
        # Contents count as contents, not as the trees that link to them.
        names = sorted(_names(cache.root), key=lambda name: (name != "files", name))
        for name in names:
            place = cache.root / name
            entries = len(_names(place)) if place.is_dir() else 1
            if name == "files":
                entries = sum(len(_names(folder)) for folder in place.iterdir())
            size = _size(place, seen)
            parts.append(Part(name, KINDS.get(name, ""), entries, size))
    parts.sort(key=lambda part: -part.bytes)
    return Contents(cache.root, tuple(parts))


def gc(
    cache: Cache,
    *,
    builds: Collection[str] = (),
    sdists: Collection[str] = (),
    unused_for: float = 14 * DAY,
    dry_run: bool = False,
) -> Removed:
    """Remove leftovers of killed runs, folders of older formats, trees and results
    that were not used for a while, and contents that no tree has.

    Args:
        builds: keys of the trees to keep however old.
        sdists: sha256 of the archives to keep; others go when they are old.
        unused_for: seconds after which something counts as not used.
        dry_run: only say what would go.

    Raises:
        EnvironmentProblem: no right to remove it.
    """
    with writing(cache.root):
        if not dry_run:
            cache.sweep()
        gone = [
            *_older_formats(cache),
            *_unused(cache.builds, unused_for, builds),
            *_unused(cache.sdists, unused_for, sdists),
            *(
                result
                for folder in _children(cache.results)
                for result in _unused(folder, unused_for, ())
            ),
        ]
        left = [path for path in _children(cache.builds) if path not in gone]
        sources = _sources(cache, left)
        # A run at this moment may have added contents for a tree to come.
        recent = time.time() - RECENT
        gone += [
            path
            for folder in _children(cache.contents.root)
            for path in _children(folder)
            if path.name.removesuffix("x") not in sources
            and path.stat().st_ctime < recent
        ]
        freed = _freed(gone)
        if not dry_run:
            for path in gone:
                _remove(path)
            forget(cache, sources)
    return Removed(tuple(str(path.relative_to(cache.root)) for path in gone), freed)


def _sources(cache: Cache, homes: Collection[Path]) -> set[str]:
    """The contents that trees hold, with the byte code of these."""
    used: set[str] = set()
    for home in homes:
        manifest = manifest_of(cache, home.name)
        if manifest is not None:
            used |= {content.sha256 for content in manifest.members.values()}
    code = load_index(cache)
    return used | {code[source].sha256 for source in used & code.keys()}


def _older_formats(cache: Cache) -> Iterator[Path]:
    """Folders that only earlier versions of the tool made."""
    old = cache.root / "wheels"
    if old.is_dir():
        yield old


def _unused(folder: Path, seconds: float, keep: Collection[str]) -> Iterator[Path]:
    limit = time.time() - seconds
    for path in _children(folder):
        if path.name not in keep and path.stat().st_mtime < limit:
            yield path


def _children(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder)] if folder.is_dir() else []


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _walk(place: Path) -> Iterator[os.stat_result]:
    """The status of a file, or of a folder and everything below it."""
    yield place.lstat()
    if place.is_dir() and not place.is_symlink():
        for folder, folders, names in os.walk(place):
            for name in (*folders, *names):
                with contextlib.suppress(FileNotFoundError):
                    yield os.lstat(os.path.join(folder, name))


def _size(place: Path, seen: set[tuple[int, int]]) -> int:
    """The bytes on disk of what is not `seen` yet."""
    total = 0
    for status in _walk(place):
        inode = (status.st_dev, status.st_ino)
        if inode not in seen:
            seen.add(inode)
            total += status.st_blocks * _BLOCK
    return total


def _freed(gone: Collection[Path]) -> int:
    """The bytes on disk of files that lose all their names, and of folders."""
    names: dict[tuple[int, int], int] = {}
    total = 0
    for path in gone:
        for status in _walk(path):
            inode = (status.st_dev, status.st_ino)
            names[inode] = names.get(inode, 0) + 1
            if stat.S_ISDIR(status.st_mode) or names[inode] == status.st_nlink:
                total += status.st_blocks * _BLOCK
    return total


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
