# SPDX-License-Identifier: Apache-2.0
"""A checked-out tree that moves to another one by writing only what differs."""

from pathlib import Path

from xpustack.base.store import Store
from xpustack.core.checkout import Checkout
from xpustack.series.tree import Tree


class MovingTree:
    """The files of one tree in the new directory `folder`, with their git `index`."""

    def __init__(self, store: Store, folder: Path, index: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._git = Checkout(store.cache.objects, work_tree=folder, index=index)
        self._tree: str | None = None

    def move(self, tree: Tree) -> None:
        """Make the folder hold `tree`.

        Raises:
            EnvironmentProblem: the disk is full, or writing there is denied.
        """
        if self._tree is None:
            self._git.check_out(tree.tree_id)
        else:
            self.restore()
            self._git.switch(self._tree, tree.tree_id)
        self._tree = tree.tree_id

    def restore(self) -> None:
        """Undo what anything else wrote into the folder."""
        self._git.restore()
