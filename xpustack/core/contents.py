# SPDX-License-Identifier: Apache-2.0
"""The contents of installed files, each stored once and linked into every tree.

A content's file is read-only and its name is its sha256. Its modification time is
derived from the sha256 too, so two contents of the same size differ in time: Python
decides by size and time of the source whether byte code is current.
"""

import hashlib
import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

_FIRST_TIME = 315532800
"""1980-01-01, the first moment that a zip archive can hold."""


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an installed file holds, and whether it may be executed."""

    sha256: str
    size: int
    executable: bool = False

    @classmethod
    def of(cls, data: bytes, executable: bool = False) -> "Content":
        return cls(hashlib.sha256(data).hexdigest(), len(data), executable)

    @property
    def mode(self) -> int:
        return 0o555 if self.executable else 0o444

    @property
    def time(self) -> int:
        """The modification time of every file with this content."""
        return _FIRST_TIME + (int(self.sha256[:8], 16) >> 2)


class FileVerifier:
    """Verifies files, and remembers the result: a file with many names is read once.

    One verifier serves one run: a change later in the run goes unnoticed.
    """

    def __init__(self) -> None:
        self._intact: dict[int, dict[int, Content]] = {}

    def is_intact(self, path: str | Path, content: Content) -> bool:
        """Whether `path` is a regular file with this content, mode and time."""
        try:
            status = os.stat(path, follow_symlinks=False)
            intact = self.intact_on(status.st_dev)
            if intact.get(status.st_ino) == content:
                return True
            if (
                status.st_mode != stat.S_IFREG | content.mode
                or status.st_size != content.size
                or status.st_mtime != content.time
            ):
                return False
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return False
        if sha256 == content.sha256:
            intact[status.st_ino] = content
        return sha256 == content.sha256

    def intact_on(self, device: int) -> dict[int, Content]:
        """What this run has read and found intact on a device, by inode."""
        return self._intact.setdefault(device, {})


@dataclass(frozen=True)
class Contents:
    """A folder of contents, which need not exist yet, and one run's verifier."""

    root: Path
    verifier: FileVerifier

    def path(self, content: Content) -> Path:
        name = content.sha256 + ("x" if content.executable else "")
        return self.root / name[:2] / name

    def holds(self, content: Content) -> bool:
        """Whether this content is stored and undamaged."""
        return self.verifier.is_intact(self.path(content), content)

    def add(self, data: bytes, *, executable: bool = False) -> Content:
        """Store `data`; a damaged file of this content is replaced.

        Raises:
            OSError: the disk is full, or writing there is denied.
        """
        content = Content.of(data, executable)
        target = self.path(content)
        if self.holds(content):
            return content
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{secrets.token_hex(8)}.new"
        try:
            temporary.write_bytes(data)
            os.chmod(temporary, content.mode)
            os.utime(temporary, (content.time, content.time))
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
