# SPDX-License-Identifier: Apache-2.0
"""An installed tree: a folder of read-only files, and a manifest that lists them.

What an earlier tree has as well are links to its files. Every module has its byte code
beside it. Python checks the source's hash in it on import, so neither a test nor
another tree can make it stale.
"""

import contextlib
import hashlib
import os
import py_compile
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from stack.core.cache import Cache
from stack.core.files import link_or_copy

Members = dict[str, str]
"""The files of an installed tree by path, byte code included, each with its sha256; and
its folders, with nothing."""
Files = dict[str, bytes | str]
"""Files to install by path: a content, or the place of an earlier tree's file to link.
A tree has 6,000, so places are strings: joining `Path`s took longer than linking."""
SITE = "site"
_MANIFEST = "manifest.json"
_MODE = 0o444
_BYTE_CODE = "__pycache__"
_SUFFIX = f".{sys.implementation.cache_tag}.pyc"


@dataclass(frozen=True)
class Build:
    """A tree's installed files.

    `key` is a hash of everything that affects them. `cached` is true if they were
    already installed.
    """

    key: str
    version: str
    installed: Path
    seconds: float
    cached: bool


def manifest_of(cache: Cache, key: str) -> Members | None:
    """The members of the build `key`; None if there are none or the list is damaged."""
    try:
        data = (cache.builds / key / _MANIFEST).read_bytes()
        return msgspec.json.decode(data, type=Members)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def from_wheel(members: Members) -> Members:
    """The files that the wheel installs: neither byte code nor folders."""
    return {
        path: sha256
        for path, sha256 in members.items()
        if sha256 and PurePosixPath(path).parent.name != _BYTE_CODE
    }


def byte_code_path(module: str) -> str:
    """Where this Python looks for the byte code of a module."""
    folder, _, name = module.rpartition("/")
    return f"{folder}/{_BYTE_CODE}/{name.removesuffix('.py')}{_SUFFIX}".lstrip("/")


def shared(cache: Cache, files: Mapping[str, bytes]) -> Files:
    """Files, with links in place of what the newest build has as well, intact and with
    its byte code. What another run has not finished is not looked at."""
    manifests = cache.builds.glob(f"[!.]*/{_MANIFEST}")
    newest = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return dict(files)
    members, site = manifest_of(cache, newest.parent.name), newest.with_name(SITE)
    intact = dict((members or {}).items() & _listing(cache, site).items())
    mixed: Files = {}
    for path, data in files.items():
        code = byte_code_path(path) if path.endswith(".py") else path
        if code in intact and intact.get(path) == hashlib.sha256(data).hexdigest():
            mixed |= {path: f"{site}/{path}", code: f"{site}/{code}"}
        else:
            mixed[path] = data
    return mixed


def install(cache: Cache, files: Files, home: Path) -> None:
    """Write a tree's files and the byte code of new modules into the new directory
    `home`, and list them there.

    Raises:
        OSError: the disk is full, or writing there is denied.
    """
    folder = home / SITE
    for name in {path.rpartition("/")[0] for path in files}:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        if isinstance(content, str):
            link_or_copy(content, f"{folder}/{path}")
            continue
        target, code = folder / path, str(folder / byte_code_path(path))
        target.write_bytes(content)
        target.chmod(_MODE)
        # The result is None where a module does not compile.
        if path.endswith(".py") and py_compile.compile(
            *(str(target), code, path),
            quiet=2,
            optimize=0,
            invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
        ):
            os.chmod(code, _MODE)
    (home / _MANIFEST).write_bytes(msgspec.json.encode(_listing(cache, folder)))


def damage(cache: Cache, members: Members, site: Path) -> str | None:
    """The first difference between an installed tree and its list; None if there is
    none.

    Raises:
        OSError: reading the tree is denied.
    """
    found = _listing(cache, site)
    for path in sorted({path for path, _ in found.items() ^ members.items()}):
        if path not in members:
            return f"{path} does not belong to it"
        if path not in found:
            return f"{path} is missing"
        return f"{path} is changed"
    return None


def _listing(cache: Cache, site: Path) -> Members:
    """The members of an installed tree as they are on disk. What is gone has none."""
    members: Members = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        with (
            contextlib.suppress(FileNotFoundError),
            os.scandir(f"{site}/{folder}") as entries,
        ):
            for entry in entries:
                path = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    members[path] = ""
                    folders.append(f"{path}/")
                else:
                    members[path] = _content(cache, entry)
    return members


def _content(cache: Cache, entry: os.DirEntry[str]) -> str:
    """The sha256 of a read-only regular file, and the mode of anything else."""
    status = entry.stat(follow_symlinks=False)
    if status.st_mode != stat.S_IFREG | _MODE:
        return oct(status.st_mode)
    file_id = (status.st_dev, status.st_ino, status.st_mtime_ns)
    if file_id not in cache.digests:
        with open(entry, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        cache.digests[file_id] = digest.hexdigest()
    return cache.digests[file_id]
