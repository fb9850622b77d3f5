# SPDX-License-Identifier: Apache-2.0
"""mypy's cache of the installed packages, shared by all releases.

Three quarters of a first run go to torch, transformers and the like, which are the
same for every release. mypy itself verifies each entry's source and options.
"""

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from xpustack.core import fingerprint
from xpustack.core.cache import Cache, writing

_SIZE_LIMIT = 300 << 20
"""Bytes for all environments: two of a usual size fit."""
_TABLE = "files2"
_NO_DEPENDENCIES = ("@deps.meta.json", b'{"snapshot": {}, "deps_meta": {}}')
"""Without it mypy's fine-grained builds do not trust their cache."""


@dataclass(frozen=True)
class SitePackagesCache:
    """mypy's cache entries for one environment and one set of mypy's flags."""

    cache: Cache
    flags: tuple[str, ...]

    @property
    def path(self) -> Path:
        name = fingerprint.digest(flags=self.flags, environment=fingerprint.lock())
        return self.cache.root / "mypy" / f"{name[:32]}.db"

    def copy_to(self, target: Path) -> bool:
        """Copy the entries to a new file; False if there are none yet."""
        with writing(target), contextlib.suppress(FileNotFoundError):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path, target)
            # `_prune` keeps the databases used last.
            os.utime(self.path)
            return True
        return False

    def keep(self, database: Path, own: Collection[str]) -> None:
        """Keep a cache of mypy without the modules `own` of the release.

        A cache that is not laid out as expected is not kept.

        Raises:
            EnvironmentProblem: the disk is full, or writing there is denied.
        """
        with self.cache.scratch() as scratch, writing(self.path):
            copy = scratch / "cache.db"
            try:
                _reduce(database, copy, own)
            except sqlite3.Error:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(copy, self.path)
            _prune(self.path.parent)


def _reduce(database: Path, copy: Path, own: Collection[str]) -> None:
    def is_installed(path: str) -> bool:
        module = path.partition("/")[0].partition(".")[0]
        return module not in own and not path.endswith(".deps.json")

    with contextlib.closing(sqlite3.connect(database)) as source:
        source.create_function("is_installed", 1, is_installed)
        schema = source.execute(
            "SELECT sql FROM sqlite_master WHERE name = ?", (_TABLE,)
        ).fetchone()
        if schema is None:
            raise sqlite3.DatabaseError(f"there is no table {_TABLE}")
        with contextlib.closing(sqlite3.connect(copy)) as target:
            target.execute(schema[0])
        source.execute("ATTACH ? AS kept", (str(copy),))
        source.execute(
            f"INSERT INTO kept.{_TABLE} SELECT * FROM main.{_TABLE}"
            " WHERE is_installed(path) AND path <> ?",
            _NO_DEPENDENCIES[:1],
        )
        source.execute(
            f"INSERT INTO kept.{_TABLE} (path, mtime, data) VALUES (?, ?, ?)",
            (_NO_DEPENDENCIES[0], time.time(), _NO_DEPENDENCIES[1]),
        )
        source.commit()


def _prune(folder: Path) -> None:
    """Remove the databases used least recently, down to the size limit."""
    paths = sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime)
    free = _SIZE_LIMIT
    for number, path in enumerate(paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            continue
        free -= path.stat().st_size
        if number and free < 0:
            path.unlink(missing_ok=True)
