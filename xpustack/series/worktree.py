# SPDX-License-Identifier: Apache-2.0
"""The repository that `apply --to` makes for people to work in."""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from xpustack.base.store import Store
from xpustack.core.checkout import Checkout
from xpustack.core.errors import UsageError
from xpustack.core.files import not_ours, vacant
from xpustack.core.repository import HEADS
from xpustack.series.order import SLUG

BRANCH = HEADS + "series"
BASE = "refs/tags/base"
STATE = "xpustack.json"

_Name = Annotated[str, msgspec.Meta(pattern=r"^v[0-9][A-Za-z0-9.+!_-]*$")]
_Commit = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]
_Slug = Annotated[str, msgspec.Meta(pattern=f"^{SLUG.pattern}$")]


class State(msgspec.Struct, frozen=True):
    """The content of `.git/xpustack.json`, which `apply_to` writes.

    `base` and `tip` are commit ids. `upto` is None if the whole series was applied,
    else the slug of the last applied step, or `base` for none. `source` is the release
    from which a refresh carries steps there.
    """

    release: _Name
    base: _Commit
    tip: _Commit
    upto: _Slug | None = None
    source: _Name | None = None


@dataclass(frozen=True)
class Work:
    """A repository that `apply_to` made."""

    git: Checkout
    state: State


def open_work(directory: Path) -> Work:
    """The repository that `apply_to` made in `directory`.

    Raises:
        UsageError: there is none, or its `.git/xpustack.json` is damaged.
    """
    git_dir = directory / ".git"
    try:
        state = msgspec.json.decode((git_dir / STATE).read_bytes(), type=State)
    except OSError:
        raise UsageError(
            "the directory was not made by xpustack apply",
            path=directory,
            hint="xpustack apply RELEASE --to a new directory",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            "what xpustack apply noted about the directory is damaged",
            path=git_dir / STATE,
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
    (git.directory / STATE).write_bytes(msgspec.json.encode(state) + b"\n")


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


def replaceable(directory: Path, release: str) -> bool:
    """Whether `directory` is an unchanged result of `apply_to`; False if it is new.

    Raises:
        UsageError: it holds files or commits that would be lost.
    """
    if vacant(directory):
        return False
    if not (directory / ".git" / STATE).is_file():
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
