# SPDX-License-Identifier: Apache-2.0
"""HTML tables that the reader's browser can sort and filter."""

import html
import re
from collections.abc import Iterable, Sequence

Page = tuple[str, dict[str, str]]
"""A page's text in Markdown, and the text of each further file by name."""


def table(name: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table that the reader's browser can sort and filter. Cells are HTML."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    lines = ["<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows]
    return "\n".join(
        [
            f'<table id="{name}" class="data">',
            f"<thead><tr>{head}</tr></thead>",
            "<tbody>",
            *lines,
            "</tbody>",
            "</table>",
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


def _inline(text: str) -> str:
    """Code in tags; a long path may break after a slash."""
    return re.sub(
        r"`([^`]*)`",
        lambda code: f"<code>{code[1].replace('/', '/<wbr>')}</code>",
        html.escape(text),
    )
