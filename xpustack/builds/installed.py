# SPDX-License-Identifier: Apache-2.0
"""An installed tree: links to stored contents, and a manifest that lists them.

Every module has its byte code beside it. Python checks the source's hash in it on
import, so neither a test nor another tree can make it stale.
"""

import contextlib
import importlib.util
import marshal
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from xpustack.core.cache import Cache
from xpustack.core.contents import Content, Contents

Members = dict[str, Content]
"""The files of an installed tree by path, byte code included."""
_SITE = "site"
_MANIFEST = "manifest.json"
_BYTE_CODE = "__pycache__"
_CHECKED_HASH = 0b11
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


def site(cache: Cache, key: str) -> Path:
    """The folder of the installed files of the build `key`."""
    return cache.builds / key / _SITE


def manifest_of(cache: Cache, key: str) -> Members | None:
    """The members of the build `key`; None if there are none or the list is damaged."""
    try:
        data = (cache.builds / key / _MANIFEST).read_bytes()
        return msgspec.json.decode(data, type=Members)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def store_files(cache: Cache, files: Mapping[str, bytes]) -> Members:
    """Store files and the byte code of the modules among them.

    Raises:
        OSError: the disk is full, or writing there is denied.
    """
    members = {}
    for path, data in files.items():
        members[path] = cache.contents.add(data)
        code = _byte_code(cache, path, members[path], data)
        if code is not None:
            members[byte_code_path(path)] = code
    return members


def without_byte_code(members: Members) -> Members:
    """What the wheel installs."""
    return {
        path: content
        for path, content in members.items()
        if PurePosixPath(path).parent.name != _BYTE_CODE
    }


def byte_code_path(module: str) -> str:
    """Where this Python looks for the byte code of a module."""
    folder, _, name = module.rpartition("/")
    return f"{folder}/{_BYTE_CODE}/{name.removesuffix('.py')}{_SUFFIX}".lstrip("/")


def install(contents: Contents, members: Members, home: Path) -> None:
    """Link a tree's files into the new directory `home`, and list them there.

    Raises:
        OSError: a content is not stored, the disk is full, or writing there is denied.
    """
    for folder in sorted({str(PurePosixPath(path).parent) for path in members}):
        (home / _SITE / folder).mkdir(parents=True, exist_ok=True)
    for path, content in members.items():
        contents.link(content, home / _SITE / path)
    (home / _MANIFEST).write_bytes(msgspec.json.encode(members))


def damage(contents: Contents, members: Members, site: Path) -> str | None:
    """The first difference between an installed tree and its list; None if there is
    none.

    Raises:
        OSError: reading the tree is denied.
    """
    return next(_differences(contents, members, site), None)


def _differences(contents: Contents, members: Members, site: Path) -> Iterator[str]:
    home = f"{site}/"
    found = {
        os.path.join(place, name).removeprefix(home)
        for place, folders, files in os.walk(site)
        for name in (*folders, *files)
    }
    folders = {folder for path in members for folder in _folders(path)}
    for path in sorted(found - members.keys() - folders):
        yield f"{path} does not belong to it"
    for path, content in members.items():
        if path not in found:
            yield f"{path} is missing"
        elif not contents.is_intact(home + path, content):
            yield f"{path} is changed"


def _folders(path: str) -> Iterator[str]:
    """The folders above a file, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def _byte_code(
    cache: Cache, module: str, source: Content, data: bytes
) -> Content | None:
    """The byte code of a module, compiled once per content; None if it is no module or
    does not compile."""
    if not module.endswith(".py"):
        return None
    magic = importlib.util.MAGIC_NUMBER
    place = cache.bytecode / f"{source.sha256}.{magic.hex()}{_SUFFIX}"
    with contextlib.suppress(OSError):
        known = Content(Path(os.readlink(place)).name, place.stat().st_size)
        if cache.contents.holds(known):
            return known
    try:
        code = compile(data, module, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):
        return None
    header = magic + _CHECKED_HASH.to_bytes(4, "little")
    digest = importlib.util.source_hash(data)
    content = cache.contents.add(header + digest + marshal.dumps(code))
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):
        place.symlink_to(os.path.relpath(cache.contents.path(content), place.parent))
    return content
