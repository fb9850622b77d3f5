# SPDX-License-Identifier: Apache-2.0
"""Reads a release's archive as if its author were hostile.

The reader yields only plain files and links that stay inside the tree, relative to
the archive's one top folder. It checks each size before it reads, so a small archive
cannot become a large tree. tarfile's data filter runs as well, but is less strict: it
does not check the top folder, `.git`, limits or repeated paths, and it follows links
only in a tree on disk.
"""

import gzip
import hashlib
import os
import shlex
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from xpustack.core.errors import SourceError

PLAIN, EXECUTABLE, LINK = 0o100644, 0o100755, 0o120000


class ArchiveMember(NamedTuple):
    """A file as git would store it.

    `path` is POSIX, relative to the archive's top folder; `mode` is one of
    `PLAIN`, `EXECUTABLE` and `LINK`; `data` is the content, or a link's target.
    """

    path: str
    mode: int
    data: bytes


MEMBERS = 100_000
MEMBER_SIZE = 256 << 20
TOTAL_SIZE = 1 << 30
"""Limits that no honest archive exceeds: a pinned vLLM has at most 10 thousand members
and 140 MB. Sizes are in bytes, unpacked."""
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.FIFOTYPE: "a fifo",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
}
# This folder must not exist: the filter would follow links in it.
_NOWHERE = "/nonexistent"


class _Hostile(Exception):
    """Why an archive is refused; becomes a SourceError with its place."""


def members(sdist: Path, *, release: str | None = None) -> Iterator[ArchiveMember]:
    """The archive's files in their order, then its links, each path once.

    Nothing is written to disk. Links come last because each is checked against all
    others. Consume the iterator to its end: the last member may still be refused.

    Raises:
        SourceError: the archive is damaged, or has an absolute path, a `..`, a
            `.git`, a link that leaves the tree, a hard link, a device, a fifo,
            two contents under one path, or more than the limits allow. It names
            `release`, the archive and the member.
    """
    reader = _Reader()
    try:
        with (
            _LimitedGzip(sdist) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            for info in tar:
                member = reader.member(tar, info)
                if member is not None:
                    yield member
            # gzip checks the checksum at the end of the file, after the last member.
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
    """Checks members one by one, and remembers what the archive held so far."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.top: str | None = None
        self.entries: dict[str, tuple[int, bytes] | None] = {}
        """By path: the mode of a file and the digest of its content; no more of a
        folder."""
        self.targets: dict[str, tarfile.TarInfo] = {}

    def member(
        self, tar: tarfile.TarFile, info: tarfile.TarInfo
    ) -> ArchiveMember | None:
        """The next member; None for a folder, a link or an equal repetition."""
        self.count += 1
        self.total += info.size
        if self.count > MEMBERS:
            raise _Hostile(f"more than {MEMBERS} members")
        if info.size > MEMBER_SIZE:
            raise _Hostile(
                f"{info.name!r} unpacks to {info.size} bytes, more than {MEMBER_SIZE}"
            )
        if self.total > TOTAL_SIZE:
            raise _Hostile(f"it unpacks to more than {TOTAL_SIZE} bytes")
        path = self._inside_top(info)
        if info.isdir():
            self._new(path, None)
            _filter(info)
            return None
        if not path:
            raise _Hostile(f"{info.name!r} is not inside a top folder")
        if info.issym():
            self._new(path, (LINK, os.fsencode(info.linkname)))
            self.targets[path] = info
            return None
        if not info.isreg() or info.issparse():
            raise _Hostile(f"{info.name!r} is {_KINDS.get(info.type, 'no plain file')}")
        _filter(info)
        file = tar.extractfile(info)
        assert file is not None, "tarfile gives every regular member a file"
        data = file.read()
        mode = EXECUTABLE if info.mode & 0o100 else PLAIN
        new = self._new(path, (mode, hashlib.sha256(data).digest()))
        return ArchiveMember(path, mode, data) if new else None

    def links(self) -> Iterator[ArchiveMember]:
        for path, info in self.targets.items():
            self._judge(path, info.linkname)
            _filter(info)
            yield ArchiveMember(path, LINK, os.fsencode(info.linkname))

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

    def _new(self, path: str, entry: tuple[int, bytes] | None) -> bool:
        """Whether an entry of `entries` is new; False for an equal repetition."""
        for folder in PurePosixPath(path).parents[:-1]:
            self._new(str(folder), None)
        new = path not in self.entries
        first = self.entries.setdefault(path, entry)
        if first != entry:
            both = "is both a file and a folder"
            differs = "comes twice and differs"
            raise _Hostile(f"{path!r} {both if None in (first, entry) else differs}")
        return new

    def _judge(self, path: str, target: str) -> None:
        """Check a link by its text alone. It must not pass through another link,
        because a `..` after one leads to a different folder than the text says."""
        if target.startswith("/") or not target or "\0" in target:
            raise _Hostile(f"the link {path!r} leaves the tree: {target!r}")
        folder = list(PurePosixPath(path).parent.parts)
        parts = target.split("/")
        for position, part in enumerate(parts):
            if part == ".." and not folder:
                raise _Hostile(f"the link {path!r} leaves the tree: {target!r}")
            if part == "..":
                folder.pop()
            elif part not in ("", "."):
                folder.append(part)
            last = position == len(parts) - 1
            if not last and "/".join(folder) in self.targets:
                raise _Hostile(f"the link {path!r} passes through another link")


class _LimitedGzip(gzip.GzipFile):
    """Stops a stream that unpacks to more than the limits allow for all members."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Headers and padding take at most two blocks of 512 bytes per member.
        self.remaining = TOTAL_SIZE + 1024 * MEMBERS

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.remaining -= len(data)
        if self.remaining < 0:
            raise _Hostile(
                "its headers and padding are larger than an archive's may be"
            )
        return data


def _filter(info: tarfile.TarInfo) -> None:
    """Apply tarfile's data filter too, which Python has since 3.11.4."""
    if hasattr(tarfile, "data_filter"):
        try:
            tarfile.data_filter(info, _NOWHERE)
        except (tarfile.FilterError, OSError) as error:
            raise _Hostile(f"tarfile's own filter says {error}") from None


def _refusal(message: str, sdist: Path, release: str | None) -> SourceError:
    return SourceError(
        message,
        release=release,
        path=sdist,
        hint=f"tar -tvzf {shlex.quote(str(sdist))}",
    )
