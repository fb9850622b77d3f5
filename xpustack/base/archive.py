# SPDX-License-Identifier: Apache-2.0
"""Reads a release's archive as if its author were hostile.

Only plain files and links that stay inside come out, relative to the archive's
one top folder. Everything is counted before it is read, so that a small
archive cannot become a large tree. Beneath these rules lies tarfile's data filter,
which is less strict: it knows no top folder, no `.git`, no limits and no second
content under one path, and it follows a link only where the tree is on a disk.
"""

import gzip
import hashlib
import os
import shlex
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from xpustack.core.errors import SourceError

PLAIN, EXECUTABLE, LINK = 0o100644, 0o100755, 0o120000


class Member(NamedTuple):
    """A file as git would store it.

    `path` is POSIX, relative to the archive's top folder; `mode` is one of
    `PLAIN`, `EXECUTABLE` and `LINK`; `data` is the content, or a link's target.
    """

    path: str
    mode: int
    data: bytes


@dataclass(frozen=True)
class Limits:
    """What no honest archive exceeds; a pinned vLLM has 10 thousand members
    and 140 MB at most. Sizes are in bytes and count what is unpacked."""

    members: int = 100_000
    member_size: int = 256 << 20
    total_size: int = 1 << 30


LIMITS = Limits()
# Nothing may lie there: the filter would follow links that it finds on this machine.
_NOWHERE = "/nonexistent"


class _Hostile(Exception):
    """Why an archive is refused; becomes a SourceError with its place."""


def members(
    sdist: Path, *, release: str | None = None, limits: Limits = LIMITS
) -> Iterator[Member]:
    """The archive's files in their order, then its links, each path once.

    Nothing is written to disk. Links come last because a link is judged by all
    others. Consume the iterator to its end: a refusal may come late.

    Raises:
        SourceError: the archive is damaged, or has an absolute path, a `..`, a
            `.git`, a link that leaves the tree, a hard link, a device, a fifo,
            two contents under one path, or more than `limits` allows. It names
            `release`, the archive and the member.
    """
    reader = _Reader(limits)
    try:
        with (
            _Counted(sdist, limits) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            for info in tar:
                member = reader.member(tar, info)
                if member is not None:
                    yield member
            # The checksum of the whole stands at its end, behind the last member.
            while plain.read(1 << 20):
                pass
        yield from reader.links()
    except _Hostile as error:
        raise _refusal(f"the archive is refused: {error}", sdist, release) from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _refusal(f"the archive is damaged: {error}", sdist, release) from error
    except FileNotFoundError:
        raise _refusal("the archive is missing", sdist, release) from None


class _Reader:
    """What is known of an archive so far."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.count = 0
        self.total = 0
        self.top: str | None = None
        self.digests: dict[str, tuple[int, bytes]] = {}
        self.folders: set[str] = set()
        self.targets: dict[str, tarfile.TarInfo] = {}

    def member(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> Member | None:
        """The next member; None for a folder, a link or an equal repetition."""
        self.count += 1
        self.total += info.size
        if self.count > self.limits.members:
            raise _Hostile(f"more than {self.limits.members} members")
        if info.size > self.limits.member_size:
            raise _Hostile(
                f"{info.name!r} unpacks to {info.size} bytes,"
                f" more than {self.limits.member_size}"
            )
        if self.total > self.limits.total_size:
            raise _Hostile(f"it unpacks to more than {self.limits.total_size} bytes")
        path = self._inside_top(info)
        if info.isdir():
            self._folder(path)
            _filter(info)
            return None
        if not path:
            raise _Hostile(f"{info.name!r} is not inside a top folder")
        if info.issym():
            self._new(path, LINK, os.fsencode(info.linkname))
            self.targets[path] = info
            return None
        if not info.isreg() or info.issparse():
            raise _Hostile(f"{info.name!r} is {_kind(info)}")
        _filter(info)
        file = tar.extractfile(info)
        assert file is not None, "tarfile gives every regular member a file"
        data = file.read()
        mode = EXECUTABLE if info.mode & 0o100 else PLAIN
        return Member(path, mode, data) if self._new(path, mode, data) else None

    def links(self) -> Iterator[Member]:
        for path, info in self.targets.items():
            self._judge(path, info.linkname)
            _filter(info)
            yield Member(path, LINK, os.fsencode(info.linkname))

    def _inside_top(self, info: tarfile.TarInfo) -> str:
        """The member's path below the top folder; empty for that folder."""
        name = info.name
        parts = name.rstrip("/").split("/") if info.isdir() else name.split("/")
        if name.startswith("/"):
            raise _Hostile(f"{name!r} is an absolute path")
        if ".." in parts:
            raise _Hostile(f"{name!r} has a '..'")
        if "" in parts or "." in parts or "\0" in name or "\\" in name:
            raise _Hostile(f"{name!r} is not a plain path")
        if any(part.lower() == ".git" for part in parts):
            raise _Hostile(f"{name!r} reaches into git's own files")
        self.top = self.top or parts[0]
        if parts[0] != self.top:
            raise _Hostile(f"{name!r} lies outside the top folder {self.top!r}")
        return "/".join(parts[1:])

    def _folder(self, path: str) -> None:
        if path in self.digests:
            raise _Hostile(f"{path!r} is both a file and a folder")
        self.folders.add(path)

    def _new(self, path: str, mode: int, data: bytes) -> bool:
        """Whether `path` is new; False when the same was there before."""
        if path in self.folders:
            raise _Hostile(f"{path!r} is both a file and a folder")
        for folder in PurePosixPath(path).parents[:-1]:
            self._folder(str(folder))
        entry = (mode, hashlib.sha256(data).digest())
        before = self.digests.setdefault(path, entry)
        if before != entry:
            raise _Hostile(f"{path!r} comes twice and differs")
        return before is entry

    def _judge(self, path: str, target: str) -> None:
        """Follow the link by its letters. It must not pass through another
        link, because a `..` behind one leads elsewhere than it reads."""
        if target.startswith("/") or not target or "\0" in target:
            raise _Hostile(f"the link {path!r} leaves the tree: {target!r}")
        at = list(PurePosixPath(path).parent.parts)
        steps = target.split("/")
        for position, part in enumerate(steps):
            if part == ".." and not at:
                raise _Hostile(f"the link {path!r} leaves the tree: {target!r}")
            if part == "..":
                at.pop()
            elif part not in ("", "."):
                at.append(part)
            last = position == len(steps) - 1
            if not last and "/".join(at) in self.targets:
                raise _Hostile(f"the link {path!r} passes through another link")


class _Counted(gzip.GzipFile):
    """Stops a stream that unpacks to more than its headers may admit to."""

    def __init__(self, path: Path, limits: Limits) -> None:
        super().__init__(path)
        # Headers and padding take at most two blocks of 512 bytes a member.
        self.left = limits.total_size + 1024 * limits.members

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.left -= len(data)
        if self.left < 0:
            raise _Hostile("its headers hide more data than any archive needs")
        return data


def _filter(info: tarfile.TarInfo) -> None:
    """Ask tarfile's data filter, which Python has since 3.11.4, as well."""
    if hasattr(tarfile, "data_filter"):
        try:
            tarfile.data_filter(info, _NOWHERE)
        except (tarfile.FilterError, OSError) as error:
            raise _Hostile(f"tarfile's own filter says {error}") from None


def _kind(info: tarfile.TarInfo) -> str:
    if info.islnk():
        return "a hard link"
    if info.isfifo():
        return "a fifo"
    if info.isdev():
        return "a device"
    return "no plain file"


def _refusal(message: str, sdist: Path, release: str | None) -> SourceError:
    return SourceError(
        message,
        release=release,
        path=sdist,
        hint=f"tar -tvzf {shlex.quote(str(sdist))}",
    )
