# SPDX-License-Identifier: Apache-2.0
"""Which release serves which kind of checkpoint: the record that
`tests/proof/e2e` writes, and the page made of it."""

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

from proof.e2e.records.order import newest_first
from stack.base.releases import load
from stack.core import markdown
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.pages import record
from stack.pages.made import stamp

PAGE = "docs/checkpoints.md"
DATA = "docs/data/checkpoints.csv"
COMMAND = "tox -e e2e -- --full -k kind_of_checkpoint --write-table"


@dataclass(frozen=True)
class Cell:
    """How a release served a kind of checkpoint.

    Attributes:
        release: such as `v0.33.0`.
        checkpoint: the short name of the kind.
        what: the kind in a few words, the column's head.
        verdict: `serves`, `refuses` or `wrong`.
        why: figures, or the message.
        tree_id: the beginning of the id of the tree that was served.
        made: the day.
    """

    release: str
    checkpoint: str
    what: str
    verdict: str
    why: str
    tree_id: str = ""
    made: str = ""


HEADS = [field.name for field in fields(Cell)]


def cells(project: Project) -> tuple[Cell, ...]:
    """The record, the newest release first; empty if there is none.

    Raises:
        UsageError: the file has other columns.
    """
    path = project.root / DATA
    if not path.is_file():
        return ()
    heads, *rows = csv.reader(io.StringIO(path.read_text("utf-8")))
    if heads != HEADS:
        raise UsageError("the record has other columns", path=path, hint=COMMAND)
    return tuple(Cell(*row) for row in rows)


def recorded(project: Project, release: str, checkpoint: str) -> Cell:
    """The recorded cell.

    Raises:
        UsageError: nobody ran that release with that kind of checkpoint.
    """
    for cell in cells(project):
        if (cell.release, cell.checkpoint) == (release, checkpoint):
            return cell
    raise UsageError(
        f"there is no result of serving {checkpoint}",
        path=project.root / DATA,
        release=release,
        hint=f"{COMMAND} --release {release}",
    )


def keep(project: Project, cell: Cell) -> None:
    """Put a cell into the record, in place of the one before it, and write the page."""
    known = {(one.release, one.checkpoint): one for one in cells(project)}
    known[cell.release, cell.checkpoint] = replace(cell, **stamp(project, cell.release))
    kinds = list(dict.fromkeys(name for _, name in known))
    rows = newest_first(
        project,
        (asdict(one) for one in known.values()),
        lambda row: (kinds.index(str(row["checkpoint"])),),
    )
    ordered = (known[str(row["release"]), str(row["checkpoint"])] for row in rows)
    shown = render(ordered, reversed(load(project).names))
    record.write(project, DATA, rows, PAGE, ("checkpoints", shown), HEADS)


def render(known: Iterable[Cell], releases: Iterable[str]) -> str:
    """The table of verdicts, one line per release."""
    found: dict[str, dict[str, Cell]] = {}
    kinds: dict[str, str] = {}
    for cell in known:
        found.setdefault(cell.release, {})[cell.checkpoint] = cell
        kinds[cell.checkpoint] = cell.what
    short = []
    for release in releases:
        of = found.get(release, {})
        row = (of[kind].verdict if kind in of else "not run" for kind in kinds)
        short.append([release, *row])
    return markdown.table(("release", *kinds.values()), short)
