# SPDX-License-Identifier: Apache-2.0
"""An installed tree: links to contents, and a manifest that lists them."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from xpustack.builds.wheel import record
from xpustack.core.cache import atomic_file
from xpustack.core.contents import Content, Contents, FileVerifier

BYTE_CODE = "__pycache__"


class Manifest(msgspec.Struct, frozen=True):
    """The files of an installed tree by path, RECORD included.

    `origin` is the key of the build from which it was derived, None if the build
    backend built it. `embedding` lists the members that contain the version.
    """

    version: str
    origin: str | None
    embedding: tuple[str, ...]
    members: dict[str, Content]

    @property
    def digest(self) -> str:
        """One sha256 over every member's path, content and mode."""
        total = hashlib.sha256()
        for path, content in sorted(self.members.items()):
            executable = "x" if content.executable else "-"
            total.update(f"{path}\0{content.sha256}\0{executable}\n".encode())
        return total.hexdigest()


def save_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest after its hash, by which `load_manifest` detects damage."""
    data = msgspec.json.encode(manifest)
    with atomic_file(path) as file:
        file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def load_manifest(path: Path) -> Manifest | None:
    """The manifest at `path`; None if there is none or it is damaged."""
    try:
        sha256, _, data = path.read_bytes().partition(b"\n")
        if hashlib.sha256(data).hexdigest().encode() != sha256:
            return None
        return msgspec.json.decode(data, type=Manifest)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def with_record(members: Mapping[str, Content], home: str) -> tuple[str, bytes]:
    """The path and the text of the RECORD that lists `members`.

    Args:
        home: the `*.dist-info` folder.
    """
    own = f"{home}/RECORD"
    rows = {
        name: (content.sha256, content.size)
        for name, content in members.items()
        if name != own
    }
    return own, record(rows, own)


def install(contents: Contents, manifest: Manifest, site: Path) -> None:
    """Link a tree's files into the new directory `site`.

    Raises:
        OSError: a content is not stored, the disk is full, or writing there is denied.
    """
    folders = {str(PurePosixPath(name).parent) for name in manifest.members}
    for folder in sorted(folders):
        (site / folder).mkdir(parents=True, exist_ok=True)
    for name, content in manifest.members.items():
        contents.link(content, site / name)


def damage(manifest: Manifest, site: Path, verifier: FileVerifier) -> str | None:
    """The first difference between an installed tree and its manifest; None if
    there is none. Byte code is ignored.

    Raises:
        OSError: reading the tree is denied.
    """
    return next(_differences(manifest, site, verifier), None)


def _differences(
    manifest: Manifest, site: Path, verifier: FileVerifier
) -> Iterator[str]:
    intact = verifier.intact_on(os.stat(site).st_dev if site.is_dir() else -1)
    for folder, expected in _by_folder(manifest).items():
        prefix = f"{folder}/" if folder else ""
        missing = set(expected)
        try:
            entries = list(os.scandir(f"{site}/{folder}"))
        except (FileNotFoundError, NotADirectoryError):
            yield f"{folder or site.name} is missing"
            continue
        for entry in entries:
            name = entry.name
            if name not in expected:
                if name != BYTE_CODE or not entry.is_dir(follow_symlinks=False):
                    yield f"{prefix}{name} does not belong to it"
                continue
            missing.discard(name)
            content = expected[name]
            if content is None:
                if not entry.is_dir(follow_symlinks=False):
                    yield f"{prefix}{name} is not a directory"
            # A directory entry has the inode, which saves a system call per file.
            elif not (
                intact.get(entry.inode()) == content
                or verifier.is_intact(entry.path, content)
            ):
                yield f"{prefix}{name} is changed"
        for name in sorted(missing):
            yield f"{prefix}{name} is missing"


def _by_folder(manifest: Manifest) -> dict[str, dict[str, Content | None]]:
    """The entries of each folder of a tree by name: a content, or None for a folder."""
    folders: dict[str, dict[str, Content | None]] = {"": {}}

    def add(folder: str) -> dict[str, Content | None]:
        parent, _, name = folder.rpartition("/")
        above = folders.get(parent)
        (above if above is not None else add(parent))[name] = None
        return folders.setdefault(folder, {})

    for path, content in manifest.members.items():
        folder, _, name = path.rpartition("/")
        entries = folders.get(folder)
        (entries if entries is not None else add(folder))[name] = content
    return folders
