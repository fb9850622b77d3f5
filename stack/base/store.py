# SPDX-License-Identifier: Apache-2.0
"""The bare object store of all bases and of all trees ever derived from them.

Bases are stored as packs, steps as loose objects, and a ref is written last. A
killed run therefore leaves unreferenced files at worst, which the next writer
sweeps. Refs are `refs/bases/<sha256 of the sdist>` and `refs/steps/<key>`.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stack.base.archive import members
from stack.base.releases import Release
from stack.core.cache import Cache, atomic_dir, count_as_used
from stack.core.git import DATE, IDENTITY
from stack.core.repository import Commit, Repository

_BASES = "refs/bases/"


@dataclass(frozen=True)
class Store:
    """The object store of a cache. The first write creates it."""

    cache: Cache

    @property
    def git(self) -> Repository:
        return Repository(self.cache.objects)

    def refs(self) -> dict[str, Commit]:
        """The commits of all stored bases and steps by ref, read in one git process."""
        if not self.cache.objects.is_dir():
            return {}
        return self.git.refs()

    def commits(self, refs: Iterable[str]) -> dict[str, Commit]:
        """As `refs`, of the given refs alone: its time is theirs, not the store's."""
        if not self.cache.objects.is_dir():
            return {}
        return self.git.commits(refs)

    def count_as_used(self, ref: str) -> None:
        """Keep a commit from the next clean-up of the cache."""
        count_as_used(self.cache.objects / ref)

    @contextlib.contextmanager
    def writing(self) -> Iterator["Writer"]:
        """Lock the store for writing: one process at a time, others wait."""
        with self.cache.lock("objects"):
            if not self.cache.objects.is_dir():
                with atomic_dir(self.cache.objects) as temporary:
                    Repository(temporary).initialize()
            _sweep(self.cache.objects)
            index = self.cache.objects / "private-index"
            yield Writer(self.cache.objects, index=index)


def base_ref(release: Release) -> str:
    """The ref under which the store keeps a release's base."""
    return _BASES + release.sha256


@dataclass(frozen=True)
class Writer(Repository):
    """The store while its lock is held, with a private index."""

    def import_base(self, release: Release, archive: Path) -> None:
        """Import an archive byte for byte, without a work tree, as one commit, while
        it is unpacked.

        Raises:
            SourceError: the archive is refused; nothing of it is left.
        """
        try:
            self.fast_import(_stream(release, archive))
        except BaseException:
            _sweep(self.directory)
            raise

    def commit(self, parent: str, message: str) -> Commit:
        """Commit the private index; no ref names it yet."""
        tree = self.write_tree()
        return Commit(self.commit_tree(tree, parent, message), tree)

    def drop(self, refs: Iterable[str]) -> None:
        """Delete refs, and the objects that no other ref reaches."""
        names = list(refs)
        self.delete_refs(names)
        # Bases are in packs.
        self.prune(packs=any(name.startswith(_BASES) for name in names))


def _stream(release: Release, archive: Path) -> Iterator[bytes]:
    """The commit of a base in the language of `git fast-import`."""
    yield f"commit {base_ref(release)}\ncommitter {IDENTITY} {DATE}\n".encode()
    yield _data(
        f"vLLM {release.version}\n\n"
        f"Base: {release.sdist}\nSha256: {release.sha256}\n".encode()
    )
    for member in members(archive, release=release.name):
        yield f"M {member.mode:o} inline {member.path}\n".encode()
        yield _data(member.data)
    yield b"done\n"


def _data(content: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(content), content)


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
