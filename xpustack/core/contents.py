# SPDX-License-Identifier: Apache-2.0
"""The contents of installed files, each stored once and linked into every tree.

A content's file is read-only and its name is its sha256.
"""

import hashlib
import os
import secrets
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

_MODE = 0o444


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an installed file holds."""

    sha256: str
    size: int

    @classmethod
    def of(cls, data: bytes) -> "Content":
        return cls(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True)
class Contents:
    """A folder of contents, which need not exist yet.

    One object serves one run: it remembers which files it found intact, so a file
    with many names is read once, and a change later in the run goes unnoticed.
    """

    root: Path
    _intact: dict[tuple[int, int], Content] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def path(self, content: Content) -> Path:
        return self.root / content.sha256[:2] / content.sha256

    def is_intact(self, path: str | Path, content: Content) -> bool:
        """Whether `path` is a read-only regular file with this content."""
        try:
            status = os.lstat(path)
            file_id = (status.st_dev, status.st_ino)
            if self._intact.get(file_id) == content:
                return True
            if (status.st_mode, status.st_size) != (stat.S_IFREG | _MODE, content.size):
                return False
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return False
        if sha256 == content.sha256:
            self._intact[file_id] = content
        return sha256 == content.sha256

    def holds(self, content: Content) -> bool:
        """Whether this content is stored and undamaged."""
        return self.is_intact(self.path(content), content)

    def add(self, data: bytes) -> Content:
        """Store `data`; a damaged file of this content is replaced.

        Raises:
            OSError: the disk is full, or writing there is denied.
        """
        content = Content.of(data)
        if self.holds(content):
            return content
        target = self.path(content)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{secrets.token_hex(8)}.new"
        try:
            temporary.write_bytes(data)
            temporary.chmod(_MODE)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        return content

    def link(self, content: Content, target: Path) -> None:
        """Create the file `target` with this content: a hard link where the file
        system has them, else a copy.

        Raises:
            OSError: the content is not stored, the disk is full, or writing there is
                denied.
        """
        source = self.path(content)
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            # Another file system, no hard links, or too many of this file.
            shutil.copy2(source, target)
