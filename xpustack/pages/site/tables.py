# SPDX-License-Identifier: Apache-2.0
"""HTML tables that the reader's browser can sort and filter."""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Page = tuple[str, dict[str, str]]
"""A page's text in Markdown, and the text of each further file by name."""


@dataclass(frozen=True)
class Cell:
    """A cell's HTML, and the number by which its column sorts.

    DataTables looks for an order in the first row alone: a column has one in all of its
    cells or in none.
    """

    text: str
    order: int


def state(kind: str, text: str, *, title: str = "", note: str = "") -> str:
    """A state as a coloured word.

    Args:
        kind: the class of the state, such as `green` or `absent`.
        title: shown where a mouse points at it.
        note: shown after a click or a touch.
    """
    about = f' title="{html.escape(title)}"' if title else ""
    word = f'<span class="state {kind}"{about}>{html.escape(text)}</span>'
    if not note:
        return word
    return f"<details><summary>{word}</summary> {html.escape(note)}</details>"


def table(
    name: str, heads: Sequence[str], rows: Iterable[Sequence[object | Cell]]
) -> str:
    """An HTML table that the reader's browser can sort and filter. Cells are HTML."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    lines = ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows]
    return "\n".join(
        [
            '<div class="table-wrapper">',
            f'<table id="{name}" class="data">',
            f"<thead><tr>{head}</tr></thead>",
            "<tbody>",
            *lines,
            "</tbody>",
            "</table>",
            "</div>",
        ]
    )


def columns_table(
    name: str, heads: Sequence[str], rows: Iterable[dict[str, str]]
) -> str:
    """A table of some columns of rows that are plain text."""
    return table(name, heads, ([html.escape(row[h]) for h in heads] for row in rows))


def rows_table(name: str, rows: Sequence[dict[str, str]]) -> str:
    """A table of rows whose cells are Markdown with code alone."""
    heads = list(rows[0]) if rows else []
    return table(name, heads, ([_inline(row[head]) for head in heads] for row in rows))


def _cell(cell: object) -> str:
    if isinstance(cell, Cell):
        # Columns of bare numbers are aligned to the right.
        return f'<td data-order="n{cell.order:07}">{cell.text}</td>'
    return f"<td>{cell}</td>"


def _inline(text: str) -> str:
    """Code in tags; a long path may break after a slash."""
    return re.sub(
        r"`([^`]*)`",
        lambda code: f"<code>{code[1].replace('/', '/<wbr>')}</code>",
        html.escape(text),
    )
