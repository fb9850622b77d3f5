# SPDX-License-Identifier: Apache-2.0
"""The folder of an export: what it held before, and how it is written.

The new folder is written beside the old one and then takes its name. It never
replaces something that a person changed.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.cache import replace_dir
from xpustack.core.checkout import Checkout
from xpustack.core.errors import UsageError
from xpustack.core.folders import not_ours, vacant
from xpustack.core.repository import HEADS, NoSuchPath
from xpustack.export.pull_request import (
    TEMPLATE,
    PullRequest,
    Template,
    cover,
    describe,
)
from xpustack.export.upstream_trees import Person
from xpustack.series.tree import BaseTree, Series
from xpustack.series.worktree import BASE

REPOSITORY = "repository"
MAILS = "mails"
TEXTS = "pull-requests"
COVER = "cover.md"
RANGE_DIFF = "range-diff.txt"
_STATE = "export.json"


class ExportState(msgspec.Struct, frozen=True):
    """The content of `export.json`: the export's number, its base and branches as
    commits, oldest first, and the sha256 of every written file."""

    release: str
    number: int
    base: str
    branches: dict[str, str]
    files: dict[str, str]


def previous_export(directory: Path, release: Release) -> ExportState | None:
    """The export that `directory` holds; None if it is new or empty.

    Raises:
        UsageError: it holds something else, or a person changed it.
    """
    if vacant(directory):
        return None
    try:
        state = msgspec.json.decode((directory / _STATE).read_bytes(), type=ExportState)
    except (OSError, msgspec.DecodeError):
        raise not_ours(directory, release.name, "export") from None
    if state.release != release.name:
        raise UsageError(
            f"the directory holds an export of {state.release}",
            release=release.name,
            path=directory,
            hint="choose a new directory",
        )
    if changes := list(_changes(directory, state)):
        raise UsageError(
            "the directory holds work that exporting again would lose",
            release=release.name,
            path=directory,
            detail=changes[:10],
            hint=f"bring it into patches/{release.name}, or choose another directory",
        )
    return state


def write_export(
    store: Store,
    exported: Series,
    requests: Sequence[PullRequest],
    person: Person,
    directory: Path,
    previous: ExportState | None,
) -> ExportState:
    """Write an export to `directory` and replace the previous one.

    Args:
        exported: the exported trees.
        requests: one per step.

    Raises:
        EnvironmentProblem: the disk is full, or writing there is denied; nothing
            changed then.
    """
    number = previous.number + 1 if previous else 1
    with replace_dir(directory) as temporary:
        git = _repository(store, temporary / REPOSITORY, exported, requests, person)
        if previous is not None:
            _range_diff(git, directory, temporary, previous, exported)
        _mails(git, temporary / MAILS, requests)
        _texts(store, exported.base, requests, person, temporary, number)
        state = ExportState(
            exported.base.release.name,
            number,
            exported.base.commit,
            {
                request.branch: tree.commit
                for request, tree in zip(requests, exported.steps, strict=True)
            },
            dict(_hashes(temporary)),
        )
        (temporary / _STATE).write_bytes(msgspec.json.encode(state) + b"\n")
    return state


def _repository(
    store: Store,
    directory: Path,
    exported: Series,
    requests: Sequence[PullRequest],
    person: Person,
) -> Checkout:
    """A repository with the base, one branch per step, and the last one checked out."""
    git = Checkout.of(directory)
    git.initialize()
    git.copy_history(store.git, exported.tip.commit)
    git.configure({"user.name": person.name, "user.email": person.email})
    git.set_ref(BASE, exported.base.commit)
    for request, tree in zip(requests, exported.steps, strict=True):
        git.set_ref(HEADS + request.branch, tree.commit)
    git.set_head(HEADS + requests[-1].branch)
    git.check_out(exported.tip.commit)
    return git


def _range_diff(
    git: Checkout,
    directory: Path,
    temporary: Path,
    previous: ExportState,
    exported: Series,
) -> None:
    """Keep the previous export's branches, and write what changed since."""
    kept = f"refs/exports/{previous.number}"
    git.fetch(
        directory / REPOSITORY / ".git",
        "+refs/exports/*:refs/exports/*",
        f"+{HEADS}*:{kept}/*",
    )
    tip = list(previous.branches.values())[-1]
    text = git.range_diff(
        (previous.base, tip), (exported.base.commit, exported.tip.commit)
    )
    (temporary / RANGE_DIFF).write_bytes(text)


def _mails(git: Checkout, directory: Path, requests: Sequence[PullRequest]) -> None:
    directory.mkdir()
    git.format_patches(BASE, directory)
    for path, request in zip(sorted(directory.iterdir()), requests, strict=True):
        path.rename(directory / request.mail)


def _texts(
    store: Store,
    base: BaseTree,
    requests: Sequence[PullRequest],
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
    """The sha256 of each written file, without the repository and the state."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and name.parts[0] not in (REPOSITORY, _STATE):
            yield name.as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()


def _changes(directory: Path, state: ExportState) -> Iterator[str]:
    """The differences from the written export, one line per difference."""
    hashes = dict(_hashes(directory))
    for name in sorted(hashes.keys() | state.files.keys()):
        if hashes.get(name) != state.files.get(name):
            yield f"changed: {name}"
    git = Checkout.of(directory / REPOSITORY)
    yield from git.status()
    branches = {
        (ref.removeprefix(HEADS), commit.id) for ref, commit in git.refs(HEADS).items()
    }
    for branch, tip in sorted(branches ^ set(state.branches.items())):
        yield f"branch: {branch} {tip}"
