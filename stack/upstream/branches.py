# SPDX-License-Identifier: Apache-2.0
"""The branches of an export in a contributor's clone, or in a bundle for it.

Only `publish` writes to the clone: objects, and refs below `refs/heads/xpu-dsv4/`.
"""

from collections.abc import Mapping
from pathlib import Path

from stack.base.clone import Clone
from stack.core.errors import UsageError, command
from stack.core.repository import HEADS

PREFIX = "xpu-dsv4"


def branch_of(slug: str) -> str:
    """The name of a step's branch."""
    return f"{PREFIX}/{slug}"


def require_room(clone: Clone) -> None:
    """Require that branches below `PREFIX` can be made.

    Raises:
        UsageError: the clone has a branch of that very name, and git keeps a branch
            where it would need a folder.
    """
    if HEADS + PREFIX in clone.git.refs(HEADS + PREFIX):
        rename = ("branch", "-m", PREFIX, f"my-{PREFIX}")
        raise UsageError(
            f"the clone has a branch {PREFIX}, so git makes none below it",
            path=clone.place,
            hint=command("git", "-C", clone.place, *rename)
            + ", or --bundle to leave the clone as it is",
        )


def require_free(
    clone: Clone, branches: Mapping[str, str], before: Mapping[str, str]
) -> None:
    """Require that no branch of the clone would be lost.

    Args:
        branches: the commits to be published by branch.
        before: those of the export that this one replaces.

    Raises:
        UsageError: the clone has a branch of that name which no export wrote, or the
            branch is checked out.
    """
    present = {
        ref.removeprefix(HEADS): commit.id
        for ref, commit in clone.git.refs(HEADS + PREFIX).items()
    }
    for branch, commit in branches.items():
        if present.get(branch, commit) in (commit, before.get(branch)):
            continue
        raise UsageError(
            f"the clone has a branch {branch} that is not from this export folder",
            path=clone.place,
            hint=command(
                *("git", "-C", clone.place, "branch", "-m", branch, f"my-{branch}")
            )
            + ", or --bundle to leave the clone as it is",
        )
    trees = clone.git.text("worktree", "list", "--porcelain").splitlines()
    for line in trees:
        branch = line.removeprefix(f"branch {HEADS}")
        if branch in branches and present.get(branch) != branches[branch]:
            raise UsageError(
                f"the branch {branch} is checked out: its files would stay old",
                path=clone.place,
                hint=command("git", "-C", clone.place, "switch", "--detach")
                + ", or --bundle to leave the clone as it is",
            )


def publish(clone: Clone, branches: Mapping[str, str]) -> None:
    """Set branches of the clone to commits of its view."""
    clone.git.copy_history(clone.view, branches.values(), [clone.commit])
    lines = (f"update {HEADS}{name} {id}\n" for name, id in branches.items())
    clone.git.run("update-ref", "--stdin", data="".join(lines).encode())


def bundle(clone: Clone, branches: Mapping[str, str], file: Path) -> None:
    """Write branches as a bundle, which `git fetch` reads where the commit is."""
    refs = [HEADS + name for name in branches]
    for ref, commit in zip(refs, branches.values(), strict=True):
        clone.view.set_ref(ref, commit)
    clone.view.run(
        *("bundle", "create", "--quiet", str(file), *refs, f"^{clone.commit}")
    )
