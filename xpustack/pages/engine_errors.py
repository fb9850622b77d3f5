# SPDX-License-Identifier: Apache-2.0
"""How far the engine's attention is from Hugging Face's, untouched and patched: the
record that `tests/e2e` writes, and the table made of it."""

from collections.abc import Iterable, Mapping, Sequence

from xpustack.base.releases import load
from xpustack.core import markdown
from xpustack.core.cache import atomic_file
from xpustack.core.project import Project
from xpustack.core.rows import csv_text, read_rows

PAGE = "docs/e2e.md"
DATA = "docs/data/e2e.csv"
COMMAND = "tox -e e2e -- --full -k side_by_side --write-table"

SIDES = ("untouched", "patched")
SHOWN = {"core %": "attention (core)", "output %": "output behind it"}
"""The figures of the page's table, and how it calls them."""


def keep(project: Project, release: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Put a release's rows into the record, in place of those before them, and write
    the page. A row is one layer of one request: `release`, `tokens`, the layer's
    `ratio`, and for each figure a cell `FIGURE, untouched` and `FIGURE, patched`, the
    first empty if the release does not start."""
    newest = list(reversed(load(project).names))
    known: list[Mapping[str, object]] = [
        row for row in read_rows(project.root / DATA) if row["release"] != release
    ]
    ordered = sorted(
        (row for row in (*known, *rows) if row["release"] in newest),
        key=lambda row: (
            newest.index(str(row["release"])),
            -int(str(row["tokens"])),
            int(str(row["ratio"])),
        ),
    )
    with atomic_file(project.root / DATA) as file:
        file.write(csv_text(ordered).encode())
    page = project.root / PAGE
    whole = markdown.with_section(page, "figures", render(project))
    with atomic_file(page) as file:
        file.write(whole.encode())


def render(project: Project) -> str:
    """The smallest and the largest figure of each release, the newest first."""
    of: dict[str, list[dict[str, str]]] = {}
    for row in read_rows(project.root / DATA):
        of.setdefault(row["release"], []).append(row)
    heads = [f"{name}, {side}" for name in SHOWN.values() for side in SIDES]
    lines = [
        [release]
        + [
            _range(row[f"{figure}, {side}"] for row in rows)
            for figure in SHOWN
            for side in SIDES
        ]
        for release, rows in of.items()
    ]
    return markdown.table(("release", *heads), lines)


def _range(cells: Iterable[str]) -> str:
    figures = sorted(float(cell) for cell in cells if cell)
    if not figures:
        return "does not start"
    ends = dict.fromkeys(
        f"{figure:.{0 if figure >= 10 else 2}f}" for figure in (figures[0], figures[-1])
    )
    return f"{' to '.join(ends)} %"
