# SPDX-License-Identifier: Apache-2.0
"""Lists what the cache holds, and removes what nobody used for some days.

An archive, a build or a result counts as used when a command takes it from the cache.
All of them can be made or downloaded again.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stack.base.store import Store
from stack.core.cache import Cache, writing
from stack.core.progress import Progress, at_most_every, silent

_DAY = 86_400
_BLOCK = 512
_SECONDS = 2.0
"""Between two messages on how far a listing is."""


@dataclass(frozen=True)
class Area:
    """One folder of the cache: its entries, and the bytes that it takes on disk, as
    `du` counts them: folders, too."""

    name: str
    entries: int
    bytes: int


def info(cache: Cache, progress: Progress = silent) -> list[Area]:
    """The areas of the cache; a file with several names counts in the first."""
    say = at_most_every(_SECONDS, progress)
    if not cache.root.exists():
        return []
    seen: set[int] = set()
    areas = []
    for folder in sorted(path for path in cache.root.iterdir() if path.is_dir()):
        size, count = 0, 0
        for files, blocks in _folders(folder, seen):
            say(f"reading {folder.name}: {count:,} files")
            size, count = size + blocks * _BLOCK, count + files
        areas.append(Area(folder.name, len(_entries(folder)), size))
    return areas


def gc(cache: Cache, *, days: float = 7) -> None:
    """Remove what was not used for `days`, and what killed runs left.

    Raises:
        EnvironmentProblem: another run uses the cache, or writing there is denied.
    """
    if not cache.root.exists():
        return
    oldest = time.time() - days * _DAY
    with cache.alone(), writing(cache.root):
        cache.sweep()
        for area in (cache.sdists, cache.builds, cache.results):
            for path in _entries(area):
                if _used(path) <= oldest:
                    _remove(path)
        store = Store(cache)
        files = {ref: cache.objects / ref for ref in store.refs()}
        stale = [
            ref
            for ref, file in files.items()
            if file.is_file() and _used(file) <= oldest
        ]
        if stale:
            with store.writing() as writer:
                writer.drop(stale)


def _entries(area: Path) -> list[Path]:
    """The entries of an area: files in folders of two letters, or whatever lies in the
    area itself."""
    pattern = "??/*" if area.name == "results" else "*"
    return sorted(area.glob(pattern))


def _folders(folder: Path, seen: set[int]) -> Iterator[tuple[int, int]]:
    """Of a folder and each below it: how many files it has, and the blocks of the
    folder and of those files that are not in `seen`, which they are added to.

    A listing names each file's inode. Most files of a build are links to another
    one's, and asking for the status of each takes ten times as long as the listing.
    """
    waiting = [str(folder)]
    while waiting:
        place, files, blocks = waiting.pop(), 0, 0
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(place) as entries,
        ):
            blocks += os.lstat(place).st_blocks
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                    continue
                files += 1
                if (inode := entry.inode()) not in seen:
                    seen.add(inode)
                    with contextlib.suppress(FileNotFoundError):
                        blocks += os.lstat(entry.path).st_blocks
        yield files, blocks


def _used(path: Path) -> float:
    """When an entry was made or used, in seconds since 1970."""
    return path.lstat().st_mtime


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
