# SPDX-License-Identifier: Apache-2.0
"""Whether branches that stand alone merge with each other."""

from collections.abc import Mapping
from itertools import combinations

from stack.base.store import Store
from stack.series.tree import BaseTree, Series

Conflicts = Mapping[tuple[str, str], tuple[str, ...]]
"""By pairs of branches that do not merge, the files in which they clash."""


def conflicting(
    store: Store, base: BaseTree, branches: Mapping[str, Series]
) -> Conflicts:
    """The pairs of branches that do not merge with each other.

    Args:
        base: as the store has it; the branches may stand on a commit of a clone.
    """
    with store.writing() as writer:
        commits = {
            name: writer.commit_tree(series.tip.tree_id, base.commit, f"{name}\n")
            for name, series in branches.items()
        }
        return {
            (one, other): tuple(sorted({clash.path for clash in clashes}))
            for one, other in combinations(commits, 2)
            if (clashes := writer.merge(commits[one], commits[other])[1])
        }
