# SPDX-License-Identifier: Apache-2.0
"""One checked-out tree that becomes another by writing only what differs."""

from pathlib import Path

from xpustack.base.store import Store
from xpustack.core.git import Git
from xpustack.series.apply import Tree


class MovingTree:
    """The files of one tree in `folder`, which is new; `index` is git's beside it."""

    def __init__(self, store: Store, folder: Path, index: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._git = Git(store.cache.objects, folder, index)
        self._tree: str | None = None

    def move(self, tree: Tree) -> frozenset[str]:
        """Make the folder what it is in `tree`; return the paths that differ, which
        are none the first time.

        Raises:
            EnvironmentProblem: no room, or no right, to write.
        """
        if self._tree is None:
            self._git.run("read-tree", tree.tree_id)
            self._git.run("checkout-index", "--all", "--quiet", "--index")
            paths: frozenset[str] = frozenset()
        else:
            self.restore()
            listing = self._git.run(
                *("diff-tree", "-r", "-z", "--name-only", "--no-renames"),
                *(self._tree, tree.tree_id),
            )
            paths = frozenset(_paths(listing))
            self._git.run("read-tree", "-m", "-u", self._tree, tree.tree_id)
        self._tree = tree.tree_id
        return paths

    def restore(self) -> None:
        """Undo what anything else wrote into the folder."""
        changed = self._git.run("diff-files", "-z", "--name-only")
        if changed:
            self._git.run(
                *("checkout-index", "--quiet", "--force", "--index", "-z", "--stdin"),
                data=changed,
            )
        for path in _paths(self._git.run("ls-files", "-z", "--others")):
            (self.folder / path).unlink()


def _paths(listing: bytes) -> list[str]:
    return [name.decode("utf-8", "surrogateescape") for name in listing.split(b"\0")][
        :-1
    ]
