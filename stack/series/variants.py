# SPDX-License-Identifier: Apache-2.0
"""Gives a change of a step to another release's variant of its patch, by a 3-way merge.

The common ancestor is the step before the change; one side is the step after it, the
other side the variant. Messages are merged line by line, diffs as the trees that they
give.
"""

from pathlib import Path

from stack.base.store import Store
from stack.core.repository import Repository
from stack.series.diff import without_ids
from stack.series.patch import format_patch
from stack.series.tree import StepTree, Tree


def changed_variant(
    store: Store, old: StepTree, new: StepTree, own: StepTree, before: Tree
) -> bytes | None:
    """The patch of `own` with what changed from `old` to `new`, to be applied to
    `before`; None where both changed the same lines."""
    with store.writing() as writer, store.cache.scratch() as scratch:
        git = Repository(writer.directory, index=scratch / "variant")
        head = _merged_head(git, scratch, old, new, own)
        tree = _merged_tree(git, old, new, own)
        if head is None or tree is None:
            return None
        paths = {*own.step.touched, *new.step.touched}
        patched = git.files(before.tree_id, paths).keys()
        return head + without_ids(git.diff(before.tree_id, tree, sorted(patched)))


def _merged_head(
    git: Repository, scratch: Path, old: StepTree, new: StepTree, own: StepTree
) -> bytes | None:
    """What stands above the diff, merged."""
    places = []
    for name, tree in (("own", own), ("old", old), ("new", new)):
        patch = format_patch(tree.step)
        places.append(scratch / name)
        places[-1].write_bytes(patch[: len(patch) - len(tree.step.diff)])
    return git.merge_texts(*places)


def _merged_tree(
    git: Repository, old: StepTree, new: StepTree, own: StepTree
) -> str | None:
    """The tree of `own` with what changed from the tree of `old` to that of `new`."""
    ours, theirs = (
        git.commit_tree(tree.tree_id, old.commit, "one side\n") for tree in (own, new)
    )
    merged, _ = git.merge(ours, theirs)
    return merged
