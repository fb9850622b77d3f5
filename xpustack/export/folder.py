# SPDX-License-Identifier: Apache-2.0
"""The folder of an export: what it held before, and how it is written.

It is made beside its place and renamed, and never takes the place of something
that a person changed.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.cache import recover_dir, replace_dir
from xpustack.core.checkout import Checkout
from xpustack.core.errors import UsageError
from xpustack.core.folders import not_ours, vacant
from xpustack.core.repository import HEADS, NoSuchPath
from xpustack.export.pull_request import TEMPLATE, Request, Template, cover, describe
from xpustack.export.upstream_trees import Person
from xpustack.series.tree import BaseTree, Series
from xpustack.series.worktree import BASE

REPOSITORY = "repository"
MAILS = "mails"
TEXTS = "pull-requests"
COVER = "cover.md"
RANGE_DIFF = "range-diff.txt"
_STATE = "export.json"


class Made(msgspec.Struct, frozen=True):
    """What `export.json` says: the export's number, its base and branches as
    commits, oldest first, and the sha256 of every file that was written."""

    release: str
    number: int
    base: str
    branches: dict[str, str]
    files: dict[str, str]


def previous_export(directory: Path, release: Release) -> Made | None:
    """The export that `directory` holds; None if it is new or empty.

    Raises:
        UsageError: it holds something else, or what a person changed.
    """
    recover_dir(directory)
    if vacant(directory):
        return None
    try:
        made = msgspec.json.decode((directory / _STATE).read_bytes(), type=Made)
    except (OSError, msgspec.DecodeError):
        raise not_ours(directory, release.name, "export") from None
    if made.release != release.name:
        raise UsageError(
            f"the directory holds an export of {made.release}",
            release=release.name,
            path=directory,
            hint="choose a new directory",
        )
    if changes := list(_changes(directory, made)):
        raise UsageError(
            "the directory holds work that exporting again would lose",
            release=release.name,
            path=directory,
            detail=changes[:10],
            hint=f"bring it into patches/{release.name}, or choose another directory",
        )
    return made


def write_export(
    store: Store,
    final: Series,
    requests: Sequence[Request],
    person: Person,
    directory: Path,
    previous: Made | None,
) -> Made:
    """Write an export to `directory`, in the place of the previous one.

    Args:
        final: the exported trees.
        requests: one for each step.

    Raises:
        EnvironmentProblem: no room, or no right, to write; nothing changed then.
    """
    number = previous.number + 1 if previous else 1
    with replace_dir(directory) as temporary:
        git = _repository(store, temporary / REPOSITORY, final, requests, person)
        if previous is not None:
            _range_diff(git, directory, temporary, previous, final)
        _mails(git, temporary / MAILS, requests)
        _texts(store, final.base, requests, person, temporary, number)
        made = Made(
            final.base.release.name,
            number,
            final.base.commit,
            {
                request.branch: tree.commit
                for request, tree in zip(requests, final.steps, strict=True)
            },
            dict(_hashes(temporary)),
        )
        (temporary / _STATE).write_bytes(msgspec.json.encode(made) + b"\n")
    return made


def _repository(
    store: Store,
    directory: Path,
    final: Series,
    requests: Sequence[Request],
    person: Person,
) -> Checkout:
    """A repository with the base, one branch a step, and the last checked out."""
    git = Checkout.of(directory)
    git.initialize()
    git.copy_history(store.git, final.tip.commit)
    git.configure({"user.name": person.name, "user.email": person.email})
    git.set_ref(BASE, final.base.commit)
    for request, tree in zip(requests, final.steps, strict=True):
        git.set_ref(HEADS + request.branch, tree.commit)
    git.set_head(HEADS + requests[-1].branch)
    git.check_out(final.tip.commit)
    return git


def _range_diff(
    git: Checkout,
    directory: Path,
    temporary: Path,
    previous: Made,
    final: Series,
) -> None:
    """Keep the previous export's branches, and say what changed since."""
    kept = f"refs/exports/{previous.number}"
    git.fetch(
        directory / REPOSITORY / ".git",
        *("+refs/exports/*:refs/exports/*", f"+{HEADS}*:{kept}/*"),
    )
    tip = list(previous.branches.values())[-1]
    text = git.range_diff((previous.base, tip), (final.base.commit, final.tip.commit))
    (temporary / RANGE_DIFF).write_bytes(text)


def _mails(git: Checkout, directory: Path, requests: Sequence[Request]) -> None:
    directory.mkdir()
    git.format_patches(BASE, directory)
    for path, request in zip(sorted(directory.iterdir()), requests, strict=True):
        path.rename(directory / request.mail)


def _texts(
    store: Store,
    base: BaseTree,
    requests: Sequence[Request],
    person: Person,
    directory: Path,
    number: int,
) -> None:
    try:
        text = store.git.file(base.tree_id, TEMPLATE).decode("utf-8", "replace")
    except NoSuchPath:
        text = ""
    template = Template.read(text)
    (directory / TEXTS).mkdir()
    name = base.release.name
    for request in requests:
        if request.for_upstream:
            path = directory / TEXTS / f"{request.step.slug}.md"
            path.write_text(describe(request, template, name), encoding="utf-8")
    (directory / COVER).write_text(
        cover(requests, name, number, str(person)), encoding="utf-8"
    )


def _hashes(directory: Path) -> Iterator[tuple[str, str]]:
    """The written files beside repository and state, with their sha256."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and name.parts[0] not in (REPOSITORY, _STATE):
            yield name.as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()


def _changes(directory: Path, made: Made) -> Iterator[str]:
    """What differs from what was written, one line each."""
    found = dict(_hashes(directory))
    for name in sorted(found.keys() | made.files.keys()):
        if found.get(name) != made.files.get(name):
            yield f"changed: {name}"
    git = Checkout.of(directory / REPOSITORY)
    yield from git.status()
    there = {
        (ref.removeprefix(HEADS), commit.id) for ref, commit in git.refs(HEADS).items()
    }
    for branch, tip in sorted(there ^ set(made.branches.items())):
        yield f"branch: {branch} {tip}"
