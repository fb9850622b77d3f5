# SPDX-License-Identifier: Apache-2.0
"""Bar charts as SVG text, without a script and without a library.

matplotlib, which draws the benchmark, takes half a second; a bar chart is a list of
rectangles, and a reader can select its text.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _ROW, _LEFT, _RIGHT = 760, 22, 300, 90
COLOURS = ("#0b6bcb", "#c2410c")
"""The bars of the first and the second group."""


@dataclass(frozen=True)
class Bar:
    """A bar: what it is of, its length, and its group (0 or 1)."""

    label: str
    value: float
    group: int = 0


def bars(title: str, unit: str, rows: Sequence[Bar], groups: Sequence[str]) -> str:
    """A horizontal bar chart as SVG text in a box that scrolls, its bars in the given
    order.

    Args:
        unit: what a value counts, such as `instructions`.
        groups: the names of the groups, at most two.
    """
    longest = max((row.value for row in rows), default=0) or 1
    height = _ROW * (len(rows) + 2)
    room = _WIDTH - _LEFT - _RIGHT
    parts = [
        '<div class="chart-box">'
        f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {height}"'
        f' aria-label="{html.escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{html.escape(title)}</title>",
    ]
    x = _LEFT
    for number, name in enumerate(groups):
        parts.append(
            f'<rect x="{x}" y="4" width="12" height="12" fill="{COLOURS[number]}"/>'
            f'<text x="{x + 18}" y="15">{html.escape(name)}</text>'
        )
        x += 30 + 8 * len(name)
    for number, row in enumerate(rows, start=1):
        y = _ROW * number
        width = max(1.0, room * row.value / longest)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">'
            f"{html.escape(row.label)}</text>"
            f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}"'
            f' fill="{COLOURS[row.group]}"/>'
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 15}">{row.value:,.0f}</text>'
        )
    parts.append(
        f'<text x="{_LEFT}" y="{height - 6}" class="unit">{html.escape(unit)}</text>'
        "</svg></div>"
    )
    return "\n".join(parts)
