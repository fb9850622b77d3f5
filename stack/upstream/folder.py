# SPDX-License-Identifier: Apache-2.0
"""The folder of an export: what it held before, and how it is written.

The new folder is written beside the old one and then takes its name. It never
replaces something that a person changed. The branches of an export for a clone go into
the clone last, when everything else is written.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stack.base.clone import Clone
from stack.base.releases import Release
from stack.base.store import Store
from stack.core.cache import atomic_file, replace_dir
from stack.core.checkout import Checkout
from stack.core.errors import UsageError
from stack.core.files import not_ours, vacant
from stack.core.git import GitFailed
from stack.core.repository import HEADS
from stack.core.rows import csv_text, read_rows
from stack.series.tree import BaseTree, Step
from stack.series.worktree import BASE
from stack.upstream.branches import branch_of, bundle, publish
from stack.upstream.form import FIRST
from stack.upstream.pull_request import PullRequest, requests_rows
from stack.upstream.trees import Person

REPOSITORY = "repository"
MAILS = "mails"
BUNDLE = "branches.bundle"
RANGE_DIFF = "range-diff.txt"
_STATE = "export.json"
_HEADS = {"release", "step", "stands", "test"}
"""Of the columns, those that a later run reads."""
_GREEN = re.compile(r"\d+ tests, \d+ fail before.*")
"""What a row says of a test that was red before and green after."""


class ExportState(msgspec.Struct, frozen=True):
    """The content of `export.json`: the export's number, its base and branches as
    commits, and the sha256 of every written file."""

    release: str
    number: int
    base: str
    branches: dict[str, str]
    files: dict[str, str]

    def same(
        self, base: str, branches: Mapping[str, str], texts: Mapping[str, str]
    ) -> bool:
        """Whether an export of these commits and texts would be this one."""
        hashes = {name: _sha256(text.encode()) for name, text in texts.items()}
        own = {name: self.files.get(name, "") for name in hashes}
        now = base, dict(branches), hashes
        return (self.base, self.branches, own) == now


@dataclass(frozen=True)
class Place:
    """Where the branches of an export stand: a release's base in the store, or a commit
    of a clone, into which they are published unless as a bundle.

    `parent` is the base's commit there.
    """

    store: Store
    base: BaseTree
    parent: str
    clone: Clone | None = None
    bundle: bool = False


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
    # The folder of a clone's export may follow the clone to a newer commit.
    if state.release.partition("+g")[:2] != release.name.partition("+g")[:2]:
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
    place: Place,
    branches: Mapping[str, str],
    texts: Callable[[int], Mapping[str, str]],
    person: Person,
    directory: Path,
    previous: ExportState | None,
) -> ExportState:
    """Write an export to `directory` and replace the previous one.

    Args:
        branches: the commits by branch.
        texts: what people read, by its place in the folder, for the export's number.

    Raises:
        EnvironmentProblem: the disk is full, or writing there is denied; nothing
            changed then.
    """
    number = previous.number + 1 if previous else 1
    name = place.base.release.name
    with replace_dir(directory) as temporary:
        if place.clone is None:
            git = _repository(place, temporary / REPOSITORY, branches, person)
        else:
            git = Checkout(place.clone.view.directory, work_tree=temporary)
        if previous is not None:
            _range_diff(git, place, directory, temporary, previous, branches)
        first = branches.get(branch_of(FIRST), place.parent)
        for branch, commit in branches.items():
            mails = temporary / MAILS / branch.rpartition("/")[2]
            mails.mkdir(parents=True)
            without = {place.parent, *({first} - {commit})}
            git.format_patches(without, commit, mails)
        for file, text in texts(number).items():
            (temporary / file).parent.mkdir(exist_ok=True)
            (temporary / file).write_text(text, encoding="utf-8")
        if place.clone is not None and place.bundle:
            bundle(place.clone, branches, temporary / BUNDLE)
        state = ExportState(
            name, number, place.parent, dict(branches), dict(_hashes(temporary))
        )
        (temporary / _STATE).write_bytes(msgspec.json.encode(state) + b"\n")
        if place.clone is not None and not place.bundle:
            publish(place.clone, branches)
    return state


def write_rows(
    file: Path,
    requests: Sequence[PullRequest],
    series: Sequence[Step],
    made: Mapping[str, str],
) -> None:
    """Write where steps stand as rows, in the order of the series, and that they were
    `made` of this tree. The file's rows of its other steps, and of other releases,
    stay."""
    rows: dict[tuple[object, object], Mapping[str, object]] = {}
    new: list[Mapping[str, object]] = [
        {**row, **made} for row in requests_rows(requests)
    ]
    for row in (*read_rows(file), *new):
        rows[row["release"], row["step"]] = row
    own = [(step.release, step.slug) for step in series if not step.trailers.stays]
    others = [key for key in rows if key[0] != series[0].release]
    with atomic_file(file) as out:
        order = [rows[key] for key in (*others, *own) if key in rows]
        out.write(csv_text(order).encode())


def known_needs(file: Path, release: str) -> dict[str, tuple[str, ...]]:
    """What a release's steps need, by those rows of an earlier run that say that the
    step's test was green.

    Raises:
        UsageError: the file has other columns, is no text or is a folder.
    """
    try:
        rows = read_rows(file)
    except UnicodeDecodeError:
        rows = [{}]
    if file.is_dir() or any(not row.keys() >= _HEADS for row in rows):
        raise UsageError(
            f"these are not rows with the columns {', '.join(sorted(_HEADS))}",
            release=release,
            path=file,
            hint="--rows takes what an earlier run wrote, or a new file",
        )
    return {
        row["step"]: () if row["stands"] == "alone" else _names(row["stands"])
        for row in rows
        if row["release"] == release and _GREEN.fullmatch(row["test"])
    }


def _names(stands: str) -> tuple[str, ...]:
    return tuple(stands.removeprefix("after ").split(", "))


def _repository(
    place: Place, directory: Path, branches: Mapping[str, str], person: Person
) -> Checkout:
    """A repository with the base and the branches, the last one checked out."""
    git = Checkout.of(directory)
    git.initialize()
    wanted = [place.parent, *branches.values()]
    git.copy_history(place.store.git, wanted)
    git.configure({"user.name": person.name, "user.email": person.email})
    git.set_ref(BASE, place.parent)
    for branch, commit in branches.items():
        git.set_ref(HEADS + branch, commit)
        git.set_head(HEADS + branch)
    git.check_out(wanted[-1])
    return git


def _range_diff(
    git: Checkout,
    place: Place,
    directory: Path,
    temporary: Path,
    previous: ExportState,
    branches: Mapping[str, str],
) -> None:
    """Write what changed in each branch since the previous export, and keep its
    commits. A clone has them as long as its owner did not remove them."""
    if place.clone is None:
        git.fetch(
            directory / REPOSITORY / ".git",
            "+refs/exports/*:refs/exports/*",
            f"+{HEADS}*:refs/exports/{previous.number}/*",
        )
    text = b""
    for branch, commit in branches.items():
        before = previous.branches.get(branch)
        if before in (None, commit):
            continue
        try:
            git.commit_of(str(before))
        except GitFailed:
            continue
        ends = (previous.base, str(before)), (place.parent, commit)
        text += f"{branch}\n".encode() + git.range_diff(*ends)
    (temporary / RANGE_DIFF).write_bytes(text)


def _hashes(directory: Path) -> Iterator[tuple[str, str]]:
    """The sha256 of each written file, without the repository and the state."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and name.parts[0] not in (REPOSITORY, _STATE):
            yield name.as_posix(), _sha256(path.read_bytes())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _changes(directory: Path, state: ExportState) -> Iterator[str]:
    """The differences from the written export, one line per difference."""
    hashes = dict(_hashes(directory))
    for name in sorted(hashes.keys() | state.files.keys()):
        if hashes.get(name) != state.files.get(name):
            yield f"changed: {name}"
    if not (directory / REPOSITORY).is_dir() and "+g" in state.release:
        return
    git = Checkout.of(directory / REPOSITORY)
    yield from git.status()
    branches = {
        (ref.removeprefix(HEADS), commit.id) for ref, commit in git.refs(HEADS).items()
    }
    for branch, tip in sorted(branches ^ set(state.branches.items())):
        yield f"branch: {branch} {tip}"
