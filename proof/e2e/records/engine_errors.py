# SPDX-License-Identifier: Apache-2.0
"""How far the engine's attention is from Hugging Face's, untouched and patched: the
record that `tests/proof/e2e` writes, and the table made of it."""

from collections.abc import Iterable, Sequence

from proof.e2e.records.order import Row, newest_first
from stack.core import markdown
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages import record
from stack.pages.made import stamp

PAGE = "docs/e2e.md"
DATA = "docs/data/e2e.csv"
COMMAND = "tox -e e2e -- --full -k side_by_side --write-table"

SIDES = ("untouched", "patched")
SHOWN = {"core %": "attention (core)", "output %": "output behind it"}
"""The figures of the page's table, and how it calls them."""


def keep(project: Project, release: str, rows: Sequence[Row]) -> None:
    """Put a release's rows into the record, in place of those before them, and write
    the page. A row is one layer of one request: `release`, `tokens`, the layer's
    `ratio`, and for each figure a cell `FIGURE, untouched` and `FIGURE, patched`, the
    first empty if the release does not start.

    Raises:
        UsageError: a figure is no number, or the page has no section for the table.
    """
    known = read_rows(project.root / DATA)
    made = stamp(project, release)
    new: list[Row] = [{**row, **made} for row in rows]
    kept: list[Row] = [*(row for row in known if row["release"] != release), *new]
    ordered = newest_first(
        project, kept, lambda row: (-int(str(row["tokens"])), int(str(row["ratio"])))
    )
    record.write(project, DATA, ordered, PAGE, ("figures", render(ordered)))


def render(rows: Iterable[Row]) -> str:
    """The smallest and the largest figure of each release, in the order of the rows;
    releases with the same figures share a line."""
    of: dict[str, list[Row]] = {}
    for row in rows:
        of.setdefault(str(row["release"]), []).append(row)
    columns = [(figure, side) for figure in SHOWN for side in SIDES]
    alike: dict[tuple[str, ...], list[str]] = {}
    for release, own in of.items():
        found = tuple(_range(own, f"{figure}, {side}") for figure, side in columns)
        alike.setdefault(found, []).append(release)
    heads = (f"{SHOWN[figure]}, {side}" for figure, side in columns)
    return markdown.table(
        ("releases", *heads),
        ([", ".join(releases), *found] for found, releases in alike.items()),
    )


def _range(rows: Iterable[Row], column: str) -> str:
    try:
        figures = sorted(float(str(row[column])) for row in rows if row[column])
    except ValueError as error:
        raise UsageError(f"{column}: {error}", path=DATA, hint=COMMAND) from None
    if not figures:
        return "does not start"
    ends = dict.fromkeys(
        f"{figure:.{0 if figure >= 10 else 2}f}" for figure in (figures[0], figures[-1])
    )
    return f"{' to '.join(ends)} %"
