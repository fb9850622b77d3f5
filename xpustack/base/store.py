# SPDX-License-Identifier: Apache-2.0
"""The one bare object store: every base and every tree that was ever derived.

Bases come in as packs, steps as loose objects, and a ref is written last. A
killed run therefore leaves unreferenced files at worst, which the next writer
sweeps. Refs are `refs/bases/<sha256 of the sdist>` and `refs/steps/<key>`.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xpustack.base.archive import members
from xpustack.base.download import fetch
from xpustack.base.releases import Release
from xpustack.core.cache import Cache, atomic_dir
from xpustack.core.errors import SourceError
from xpustack.core.git import DATE, IDENTITY, Entry, Git, create
from xpustack.core.progress import Progress, silent


class Commit(NamedTuple):
    """A commit and the tree that it holds, both as 40-hex ids."""

    id: str
    tree: str


@dataclass(frozen=True)
class Store:
    """The object store of a cache. It is made when it is first written."""

    cache: Cache

    @property
    def git(self) -> Git:
        return Git(self.cache.objects)

    def refs(self) -> dict[str, Commit]:
        """Every known base and step by its ref, read by one process."""
        if not self.cache.objects.is_dir():
            return {}
        listing = self.git.text(
            "for-each-ref", "--format=%(refname) %(objectname) %(tree)", "refs/"
        )
        rows = (line.split() for line in listing.splitlines())
        return {ref: Commit(commit, tree) for ref, commit, tree in rows}

    @contextlib.contextmanager
    def writing(self, progress: Progress = silent) -> Iterator["Writer"]:
        """Hold the store for writing; one process at a time, others wait."""
        with self.cache.lock("objects", progress):
            if not self.cache.objects.is_dir():
                with atomic_dir(self.cache.objects) as temporary:
                    create(temporary, bare=True)
            _sweep(self.cache.objects)
            yield Writer(self.git.with_index(self.cache.objects / "private-index"))

    def base(
        self, release: Release, *, offline: bool = False, progress: Progress = silent
    ) -> Commit:
        """The commit of a release's base, imported at its first use.

        Raises:
            SourceError: the archive cannot be had or is not what the pin says.
        """
        ref = base_ref(release)
        known = self.refs().get(ref)
        if known is not None:
            return known
        archive = fetch(release, self.cache, offline=offline, progress=progress)
        with self.writing(progress) as writer:
            if ref not in self.refs():
                progress(f"importing {release.name}")
                writer.import_base(release, archive)
        return self.refs()[ref]


def base_ref(release: Release) -> str:
    """The ref under which the store keeps a release's base."""
    return f"refs/bases/{release.sha256}"


@dataclass(frozen=True)
class Writer:
    """The store while its lock is held; `git` has a private index."""

    git: Git

    def import_base(self, release: Release, archive: Path) -> None:
        """Import an archive byte for byte, without a work tree, as one commit."""
        chunks = [
            f"commit {base_ref(release)}\ncommitter {IDENTITY} {DATE}\n".encode()
            + _data(
                f"vLLM {release.version}\n\n"
                f"Base: {release.sdist}\nSha256: {release.sha256}\n".encode()
            )
        ]
        for member in members(archive, release=release.name):
            header = f"M {member.mode:o} inline {_quoted(member.path)}\n"
            chunks += [header.encode(), _data(member.data)]
        if len(chunks) == 1:
            raise SourceError(
                "the archive is empty", release=release.name, path=archive
            )
        chunks.append(b"done\n")
        self.git.run(
            "fast-import", "--quiet", "--done", "--depth=0", data=b"".join(chunks)
        )

    def read_tree(self, tree: str) -> None:
        """Set the private index to a tree."""
        self.git.run("read-tree", tree)

    def entries(self) -> dict[str, Entry]:
        """The private index, by path."""
        listing = self.git.run("ls-files", "--stage", "-z").decode("utf-8", "replace")
        entries = {}
        for row in listing.split("\0")[:-1]:
            properties, _, path = row.partition("\t")
            mode, blob, _ = properties.split(" ")
            entries[path] = Entry(mode, blob)
        return entries

    def add(self, files: Mapping[str, bytes], scratch: Path) -> None:
        """Add plain files to the private index, by path, through `scratch`."""
        names = [scratch / str(number) for number in range(len(files))]
        for name, content in zip(names, files.values(), strict=True):
            name.write_bytes(content)
        ids = self.git.text(
            "hash-object",
            "-w",
            "--no-filters",
            "--stdin-paths",
            data="".join(f"{name}\n" for name in names).encode(),
        ).split()
        info = "".join(
            f"100644 {blob}\t{path}\0" for path, blob in zip(files, ids, strict=True)
        )
        self.git.run("update-index", "-z", "--index-info", data=info.encode())

    def commit(self, parent: str, message: str) -> Commit:
        """Commit the private index; no ref names it yet."""
        tree = self.git.text("write-tree")
        commit = self.git.text(
            "commit-tree", tree, "-p", parent, data=message.encode("utf-8")
        )
        return Commit(commit, tree)

    def keep(self, ref: str, commit: Commit) -> None:
        """Name a commit by a ref: the last thing that a writer does."""
        self.git.run("update-ref", ref, commit.id)


def _data(content: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(content), content)


def _quoted(path: str) -> str:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _sweep(objects: Path) -> None:
    """Remove what killed git processes left; the caller holds the lock."""
    for pattern in (
        "private-index*",
        "*.lock",
        "fast_import_crash_*",
        "refs/**/*.lock",
        "objects/pack/tmp_*",
        "objects/??/tmp_obj_*",
    ):
        for path in objects.glob(pattern):
            path.unlink(missing_ok=True)
