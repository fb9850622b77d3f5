# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a release's archive.

Its sha256 is pinned and checked before. Whatever it holds, only plain files and links
come out, below the archive's one top folder, and a small archive cannot become a large
tree. tarfile's data filter is no help: it checks neither the top folder nor sizes, and
follows links only in a tree on disk.
"""

import gzip
import os
import posixpath
import shlex
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
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


SIZE = 1 << 30
"""The most bytes that an archive may unpack to, headers included. A pinned vLLM has
140 MB."""


class _Refused(Exception):
    """Why an archive is refused; becomes a SourceError with its place."""


def members(sdist: Path, *, release: str | None = None) -> Iterator[ArchiveMember]:
    """The archive's files and links in their order. Nothing is written to disk.

    Consume the iterator to its end: the last member may still be refused. Of two
    members with one path the last counts, as it does for tar.

    Raises:
        SourceError: the archive is damaged, or has an absolute path, a `..`, a
            `.git`, a link that leaves the tree, a device or the like, or more than
            `SIZE` bytes. It names `release`, the archive and the member.
    """
    try:
        with (
            _LimitedGzip(sdist) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            top: str | None = None
            for info in tar:
                first, _, path = info.name.partition("/")
                top = top or first
                if info.isdir():
                    continue
                if problem := path_problem(info.name):
                    raise _Refused(f"{info.name!r}: {problem}")
                if not path or first != top:
                    raise _Refused(f"{info.name!r} is not inside a top folder {top!r}")
                yield _member(tar, info, path)
            # gzip checks the checksum at the end of the file, after the last member.
            while plain.read(1 << 20):
                pass
    except _Refused as error:
        raise _refusal(f"the archive is refused: {error}", sdist, release) from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _refusal(f"the archive is damaged: {error}", sdist, release) from error
    except FileNotFoundError:
        raise _refusal("the archive is missing", sdist, release) from None


def path_problem(path: str) -> str | None:
    """Why `path` cannot be a file of a tree; None if it can."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        return "the path leaves the tree"
    if {"", "."} & {*parts} or {"\\", '"'} & {*path} or not path.isprintable():
        return "the path is not a plain relative path"
    if any(part.lower() == ".git" for part in parts):
        return "the path lies in .git"
    return None


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo, path: str) -> ArchiveMember:
    if info.issym():
        place = posixpath.join(posixpath.dirname(path), info.linkname)
        if posixpath.normpath(place).split("/")[0] in ("", ".."):
            raise _Refused(f"the link {path!r} leaves the tree: {info.linkname!r}")
        return ArchiveMember(path, LINK, os.fsencode(info.linkname))
    if not info.isreg() or info.issparse():
        raise _Refused(f"{info.name!r} is no plain file, no folder and no link")
    file = tar.extractfile(info)
    assert file is not None, "tarfile gives every regular member a file"
    mode = EXECUTABLE if info.mode & 0o100 else PLAIN
    return ArchiveMember(path, mode, file.read())


class _LimitedGzip(gzip.GzipFile):
    """Stops a stream that unpacks to more than `SIZE`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.remaining = SIZE

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.remaining -= len(data)
        if self.remaining < 0:
            raise _Refused(f"it unpacks to more than {SIZE} bytes")
        return data


def _refusal(message: str, sdist: Path, release: str | None) -> SourceError:
    return SourceError(
        message,
        release=release,
        path=sdist,
        hint=f"tar -tvzf {shlex.quote(str(sdist))}",
    )
