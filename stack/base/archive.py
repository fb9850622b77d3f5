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
from itertools import dropwhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from stack.core.errors import SourceError

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


MEMBERS = 100_000
MEMBER_SIZE = 1 << 28
"""The most members of an archive, folders too, and bytes of one."""


class _Refused(Exception):
    """Why an archive is refused; becomes a SourceError with its place."""


def members(sdist: Path, *, release: str | None = None) -> Iterator[ArchiveMember]:
    """The archive's files and links in their order. Nothing is written to disk.

    Consume the iterator to its end: the last member may still be refused.

    Raises:
        SourceError: the archive is damaged, or has an absolute path, a `..`, a
            `.git`, a link that leaves the tree, a device or the like, one path twice,
            or more than the limits allow. It names `release`, archive and member.
    """
    try:
        with (
            _LimitedGzip(sdist) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            top: str | None = None
            is_folder: dict[str, bool] = {}
            for number, info in enumerate(tar, start=1):
                if number > MEMBERS or info.size > MEMBER_SIZE:
                    raise _Refused(f"{info.name!r} is more than an archive may have")
                first, _, path = info.name.partition("/")
                top = top or first
                if problem := path_problem(info.name):
                    raise _Refused(f"{info.name!r}: {problem}")
                if first != top or not (path or info.isdir()):
                    raise _Refused(f"{info.name!r} is not inside a top folder {top!r}")
                if path in is_folder and not (info.isdir() and is_folder[path]):
                    raise _Refused(f"{info.name!r} is there twice")
                is_folder[path] = info.isdir()
                above = map(str, PurePosixPath(path).parents)
                if not all(is_folder.setdefault(each, True) for each in above):
                    raise _Refused(f"{info.name!r} lies in a file")
                if info.isdir():
                    continue
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
        # A `..` behind a name may follow another link, to a folder that no text shows.
        parts = dropwhile("..".__eq__, info.linkname.split("/"))
        outside = posixpath.normpath(place).split("/")[0] in ("", "..")
        if outside or ".." in parts or not info.linkname:
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
