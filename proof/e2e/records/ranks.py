# SPDX-License-Identifier: Apache-2.0
"""What each split over ranks gives beside one rank: the record that `tests/proof/e2e`
writes, and the table made of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from proof.e2e.records.order import Row, newest_first
from stack.core import markdown
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages import record
from stack.pages.made import stamp

PAGE = "docs/e2e.md"
DATA = "docs/data/ranks.csv"
COMMAND = "tox -e e2e -- --full -k ranks --write-table"
NOT_TRIED = "not tried"
FEATURES = ("plain", "MTP 1", "MTP 3", "DSpark")
"""The columns of the page's table."""


@dataclass(frozen=True)
class Cell:
    """How a release served a split with a feature: `found` is `equal`, `near tie`,
    `refused` or `no such feature`; `why` says where the tie is, what the release lacks,
    or has the message; `tree_id` and `made` are of the tree that was served."""

    release: str
    ranks: str
    features: str
    found: str
    why: str
    tree_id: str = ""
    made: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.release, self.ranks, self.features


def cells(project: Project) -> list[Cell]:
    """The record, the newest release first."""
    return [Cell(**row) for row in read_rows(project.root / DATA)]


def recorded(project: Project, cell: Cell) -> str:
    """What was found before; `not tried` if nobody tried."""
    known = {one.key: one.found for one in cells(project)}
    return known.get(cell.key, NOT_TRIED)


def keep(project: Project, cell: Cell) -> None:
    """Put a cell into the record, in place of the one before it, and write the page."""
    cell = replace(cell, **stamp(project, cell.release))
    known = {one.key: one for one in cells(project)} | {cell.key: cell}
    by_ranks = sorted({ranks for _, ranks, _ in known})
    rows = newest_first(
        project,
        map(asdict, known.values()),
        lambda row: (
            by_ranks.index(str(row["ranks"])),
            FEATURES.index(str(row["features"])),
        ),
    )
    record.write(project, DATA, rows, PAGE, ("ranks", render(rows)))


def render(rows: Sequence[Row]) -> str:
    """A line for the splits of a release that gave the same, a column for each
    feature."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        line = found.setdefault((str(row["release"]), str(row["ranks"])), {})
        line[str(row["features"])] = str(row["found"])
    alike: dict[tuple[str, ...], list[str]] = {}
    for (release, ranks), line in found.items():
        gave = (line.get(feature, NOT_TRIED) for feature in FEATURES)
        alike.setdefault((release, *gave), []).append(ranks)
    return markdown.table(
        ("release", "ranks", *FEATURES),
        [
            [release, "; ".join(ranks), *gave]
            for (release, *gave), ranks in alike.items()
        ],
    )
