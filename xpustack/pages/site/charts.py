# SPDX-License-Identifier: Apache-2.0
"""Bar charts as SVG text, without a script and without a library.

A bar chart is a list of rectangles; a reader can select its text.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _ROW, _RIGHT, _LETTER = 760, 22, 90, 6.6
COLOURS = ("#c2410c", "#0b6bcb")
"""The bars of the first and the second group: what there was, and ours."""
_TREES = ("untouched", "patched")


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
    left = 20 + round(_LETTER * max((len(row.label) for row in rows), default=0))
    longest = max((row.value for row in rows), default=0) or 1
    height = _ROW * (len(rows) + 2)
    room = _WIDTH - left - _RIGHT
    parts = [
        '<div class="chart-box">'
        f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {height}"'
        f' aria-label="{html.escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{html.escape(title)}</title>",
    ]
    x = left
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
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">'
            f"{html.escape(row.label)}</text>"
            f'<rect x="{left}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}"'
            f' fill="{COLOURS[row.group]}"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 15}">{row.value:,.0f}</text>'
        )
    parts.append(
        f'<text x="{left}" y="{height - 6}" class="unit">{html.escape(unit)}</text>'
        "</svg></div>"
    )
    return "\n".join(parts)


def path_charts(rows: Sequence[Mapping[str, str]]) -> str:
    """Attention on the XPU path, untouched beside patched, from the rows of
    `docs/data/xpu_path.csv`: a chart of decode for each release, and one of prefill."""
    cases: dict[tuple[str, str, int, int], dict[str, float]] = {}
    for row in rows:
        if row["part"] == "attention":
            case = (row["kind"], row["release"], int(row["tokens"]), int(row["batch"]))
            cases.setdefault(case, {})[row["tree"]] = float(row["microseconds"])
    charts: dict[str, list[Bar]] = {}
    for (kind, release, tokens, batch), times in sorted(cases.items()):
        if not set(_TREES) <= times.keys():
            continue
        if kind == "decode":
            title, name = f"Decode, {release}", f"{batch} at {tokens:,} tokens"
        else:
            title, name = kind.capitalize(), f"{release}, {tokens:,} tokens"
        before, after = (times[tree] for tree in _TREES)
        charts.setdefault(title, []).extend(
            (
                Bar(f"{name}: untouched", before),
                Bar(f"patched, {before / after:.1f} times as fast", after, 1),
            )
        )
    parts = [
        "## Attention, untouched and patched",
        "`16 at 1,024 tokens`: 16 requests with 1,024 tokens each. Attention has no"
        " stand-ins. The untouched release forgets the sinks: its times"
        " are those of a wrong result.",
    ]
    for title, chart in charts.items():
        drawn = bars(f"Attention: {title}", "microseconds of one step", chart, _TREES)
        parts += [f"### {title}", drawn]
    return "\n\n".join(parts)
