# SPDX-License-Identifier: Apache-2.0
"""Writes trees to disk: as plain files to build and test, or as a repository to
work in."""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.cache import Cache, atomic_dir, replace_dir
from xpustack.core.checkout import Checkout
from xpustack.core.errors import UsageError
from xpustack.core.files import not_ours, vacant
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.core.repository import HEADS
from xpustack.series.apply import trees
from xpustack.series.order import SLUG, read_order
from xpustack.series.tree import Series, Tree

BRANCH = HEADS + "series"
BASE = "refs/tags/base"
_STATE = "xpustack.json"

_Name = Annotated[str, msgspec.Meta(pattern=r"^v[0-9][A-Za-z0-9.+!_-]*$")]
_Commit = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]
_Slug = Annotated[str, msgspec.Meta(pattern=f"^{SLUG.pattern}$")]


class State(msgspec.Struct, frozen=True):
    """The content of `.git/xpustack.json`, which `apply_to` writes.

    `base` and `tip` are commit ids. `upto` is None if the whole series was applied,
    else the slug of the last applied step, or `base` for none.
    """

    release: _Name
    base: _Commit
    tip: _Commit
    upto: _Slug | None = None


@dataclass(frozen=True)
class Work:
    """A repository that `apply_to` made."""

    git: Checkout
    state: State


def checkout(store: Store, tree: Tree, directory: Path) -> None:
    """Write a tree's files to `directory`, which appears only when complete.

    Raises:
        UsageError: `directory` exists and is not empty.
        EnvironmentProblem: the disk is full, or writing there is denied.
    """
    if not vacant(directory):
        raise not_ours(directory, tree.release.name, "apply")
    with atomic_dir(directory) as temporary, store.cache.scratch() as scratch:
        place, index = store.cache.objects, scratch / "index"
        Checkout(place, work_tree=temporary, index=index).check_out(tree.tree_id)


def apply_to(
    project: Project,
    cache: Cache,
    release: Release,
    directory: Path,
    upto: str | None = None,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> Series:
    """Make `directory` a git repository with one commit for the base and one per step.

    It does not depend on the cache: objects are linked or copied. Branch `series` is
    checked out, tag `base` names the base.

    Args:
        directory: new or empty, or an unchanged result of this function.
        upto: the last step to apply, by its slug, or `base` for none; None for the
            whole series.

    Raises:
        UsageError: `directory` holds something else, or there is no step `upto`.
        StackError: as `trees`. `directory` is then as it was.
    """
    directory = directory.absolute()
    store = Store(cache)
    replaced = _replaceable(directory, release.name)
    series = trees(
        store, project, release, offline=offline, progress=progress, upto=upto
    )
    whole = upto is None or read_order(project, release.name)[-1:] == [upto]
    state = State(
        release.name, series.base.commit, series.tip.commit, None if whole else upto
    )
    with (replace_dir if replaced else atomic_dir)(directory) as temporary:
        progress(f"writing {release.name} to {directory}")
        fill(store, temporary, state)
    return series


def open_work(directory: Path) -> Work:
    """The repository that `apply_to` made in `directory`.

    Raises:
        UsageError: there is none, or its `.git/xpustack.json` is damaged.
    """
    git_dir = directory / ".git"
    try:
        state = msgspec.json.decode((git_dir / _STATE).read_bytes(), type=State)
    except OSError:
        raise UsageError(
            "the directory was not made by xpustack apply",
            path=directory,
            hint="xpustack apply RELEASE --to a new directory",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            "what xpustack apply noted about the directory is damaged",
            path=git_dir / _STATE,
            detail=[str(error)],
            hint=start_over("RELEASE", directory),
        ) from None
    return Work(Checkout.of(directory.absolute()), state)


def start_over(release: str, directory: Path) -> str:
    """The commands that copy the commits of an unusable work repository to a new
    one."""
    return (
        f"xpustack apply {release} --to NEW, then bring your commits along:"
        f" git -C NEW fetch {shlex.quote(str(directory.absolute()))} HEAD,"
        " and git -C NEW cherry-pick each of them"
    )


def fill(store: Store, directory: Path, state: State) -> None:
    """Create a work repository in an empty directory, at the state's tip."""
    git = Checkout.of(directory)
    git.initialize()
    link_objects(store, git)
    git.configure({"core.autocrlf": "false", "core.fileMode": "true"})
    git.set_ref(BASE, state.base)
    git.set_ref(BRANCH, state.tip)
    git.check_out(state.tip)
    (git.directory / _STATE).write_bytes(msgspec.json.encode(state) + b"\n")


def link_objects(store: Store, git: Checkout) -> None:
    """Link or copy the store's objects that a repository lacks."""
    source = store.cache.objects / "objects"
    with store.cache.lock("objects"):
        for folder, _, names in os.walk(source):
            target = git.directory / "objects" / Path(folder).relative_to(source)
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                if not name.startswith("tmp_"):
                    _link(os.path.join(folder, name), target / name)


def _link(source: str, target: Path) -> None:
    """A hard link where the file system has them, else a copy. Objects never change."""
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _replaceable(directory: Path, release: str) -> bool:
    """Whether `directory` is an unchanged result of `apply_to`; False if it is new.

    Raises:
        UsageError: it holds files or commits that would be lost.
    """
    if vacant(directory):
        return False
    if not (directory / ".git" / _STATE).is_file():
        raise not_ours(directory, release, "apply")
    work = open_work(directory)
    changes = pending(work, ignored=True)
    expected = {BRANCH: work.state.tip, BASE: work.state.base}
    changes += [
        f"commits: {ref} {commit.id}"
        for ref, commit in work.git.refs().items()
        if commit.id != expected.get(ref)
    ]
    if changes:
        raise UsageError(
            "the directory holds work that applying again would lose",
            release=work.state.release,
            path=directory,
            detail=changes[:10],
            hint=f"xpustack save {shlex.quote(str(directory))}, or choose another"
            " directory",
        )
    return True


def pending(work: Work, *, ignored: bool = False) -> list[str]:
    """The uncommitted changes of a work repository, in the words of `git status`."""
    operations = [f"in progress: {name}" for name in work.git.unfinished()]
    return work.git.status(ignored=ignored) + operations
