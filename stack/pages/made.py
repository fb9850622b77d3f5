# SPDX-License-Identifier: Apache-2.0
"""Which tree gave a row of docs/data, and what makes it anew.

docs/data/tables.toml has an entry for each file. A row of a run keeps the beginning of
the id of the release's last tree, and the day: where the release has another tree now,
the row is of an earlier revision, and the README has no figure of it. The command is
the file's, or the row's where each row has another one.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

import msgspec

from stack.base import releases
from stack.core import markdown
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.series.recorded import read_trees

FOLDER = "docs/data"
TABLES = f"{FOLDER}/tables.toml"
TREE, MADE, COMMAND = "tree_id", "made", "command"
UNKNOWN = ""
"""The tree of rows that were made before rows named it."""
_SHORT = 12
_FORMS = {
    TREE: ("for the id of its tree", re.compile(rf"[0-9a-f]{{{_SHORT}}}|")),
    MADE: ("for its day", re.compile(r"\d{4}-\d\d-\d\d")),
    COMMAND: ("for its command", re.compile(r"[a-z].*")),
}
"""What each row of a run has, in which form."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a file of rows is made.

    Attributes:
        key: the columns that name a row; empty where rows are of no release's tree.
        command: writes the rows.
        by: who keeps the rows where no command of this machine does.
        held_to: where rows are of no run: the file that they agree with, or the test
            or program that compares them.
    """

    key: tuple[str, ...] = ()
    command: str = ""
    by: str = ""
    held_to: str = ""


def tables(project: Project) -> dict[str, Table]:
    """The entries of docs/data/tables.toml, by the file's name without `.csv`.

    Raises:
        UsageError: an entry is malformed.
    """
    path = project.root / TABLES
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, Table])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{TABLES}: {error}", path=path) from None


def stamp(project: Project, release: str, command: str = "") -> dict[str, str]:
    """What a row of a run of `release` says of the tree that gave it, now, and of the
    command where that is not its file's."""
    day = datetime.now(UTC).date().isoformat()
    ran = {COMMAND: command} if command else {}
    return {TREE: tree_of(project, release), MADE: day, **ran}


def stamped(
    project: Project, rows: Iterable[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Rows with their stamp; those that name no release are of the newest, whose tree
    has every kernel of the checkout."""
    newest = releases.load(project).newest.name
    named = [{"release": newest, **row} for row in rows]
    stamps = {name: stamp(project, name) for name in {str(r["release"]) for r in named}}
    return [row | stamps[str(row["release"])] for row in named]


def tree_of(project: Project, release: str) -> str:
    """The beginning of the id of a release's last tree; empty without one."""
    return next(reversed(read_trees(project, release).values()), UNKNOWN)[:_SHORT]


def is_current(project: Project, row: Mapping[str, str]) -> bool:
    """Whether the release's tree of today gave the row."""
    tree = row.get(TREE, UNKNOWN)
    return tree != UNKNOWN and tree == tree_of(project, row["release"])


class Age(msgspec.Struct, frozen=True):
    """How many rows of a file and a release are of the tree of today, and of others;
    the oldest day of those."""

    table: str
    release: str
    current: int
    older: int
    since: str
    command: str
    by: str


def ages(project: Project) -> Iterator[Age]:
    """One for each release of each file whose rows name their tree.

    Raises:
        UsageError: a row lacks its tree, day or command, or two rows are of one cell.
    """
    for name, table in tables(project).items():
        if not table.key:
            continue
        by_release: dict[str, list[dict[str, str]]] = {}
        for row in checked(project, name, table):
            by_release.setdefault(row["release"], []).append(row)
        for release, rows in by_release.items():
            older = [row[MADE] for row in rows if not is_current(project, row)]
            yield Age(
                name,
                release,
                len(rows) - len(older),
                len(older),
                min(filter(None, older), default=""),
                table.command,
                table.by,
            )


def checked(project: Project, name: str, table: Table) -> list[dict[str, str]]:
    """The rows of a file, each with tree, day and command, and of a cell of its own.

    Raises:
        UsageError: one is not.
    """
    path = project.root / FOLDER / f"{name}.csv"
    rows = read_rows(path)
    ours = {COMMAND: table.command} if table.command else {}
    for row in rows:
        for column, (what, form) in _FORMS.items():
            if not form.fullmatch((row | ours).get(column, "-")):
                raise UsageError(
                    f"a row has {row.get(column)!r} {what}",
                    path=path,
                    detail=[", ".join(row.get(column) or "" for column in table.key)],
                    hint=table.command or table.by,
                )
    cells = Counter(tuple(row[column] for column in table.key) for row in rows)
    if twice := [", ".join(cell) for cell, count in cells.items() if count > 1]:
        raise UsageError(
            "two rows are of one cell",
            path=path,
            detail=twice,
            hint=table.command or table.by,
        )
    return rows


def ages_table(found: Iterable[Age]) -> str:
    """The ages as Markdown: a line for each file, its releases by age."""
    lines: dict[str, dict[str, list[str]]] = {}
    for age in found:
        line = lines.setdefault(age.table, {"current": [], "older": []})
        if age.older == 0:
            line["current"].append(age.release)
        else:
            day = f" ({age.since})" if age.since else ""
            line["older"].append(f"{age.release}{day}")
    return markdown.table(
        ("rows", "of the tree of today", "some of an earlier one, since"),
        (
            (
                f"[{name}](data/{name}.csv)",
                ", ".join(of["current"]),
                ", ".join(of["older"]),
            )
            for name, of in lines.items()
        ),
    )
