# SPDX-License-Identifier: Apache-2.0
"""The benchmark's plots as SVG text, from its rows: time over tokens, and below it per
cent of the roof, for each op and shape."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xpustack.core.rows import read_rows

BENCHMARK = "docs/data/benchmark.csv"
ATTENTION = "docs/data/benchmark_attention.csv"
"""A newer run of some ops: its rows stand in place of the older ones."""
Row = Mapping[str, str]
_COLOURS = {
    "ours": "#0b6bcb",
    "upstream 0.33.0": "#c2410c",
    "FlashMLA": "#2a8c3c",
    "torch": "#888888",
    "vllm-xpu-kernels": "#9b59d0",
}
_OTHER_COLOURS = ("#b58900", "#0f9d9d", "#d33682")
_COLUMNS, _WIDE, _HIGH = 3, 250, 262
_LEFT, _RIGHT = 56, 244
_TOP, _BOTTOM = 24, 158
"""Of the times, within a panel."""
_FULL, _ZERO = 176, 228
"""Of 100 and 0 % of the roof."""
_HEAD = 26


@dataclass(frozen=True)
class Point:
    """Microseconds and per cent of the roof at a number of tokens."""

    tokens: int
    time: float
    percent: float


@dataclass(frozen=True)
class Panel:
    """One op of one shape: the points of each candidate."""

    title: str
    lines: dict[str, list[Point]]

    @property
    def points(self) -> list[Point]:
        return [point for line in self.lines.values() for point in line]


def newest_rows(root: Path) -> list[dict[str, str]]:
    """The rows of both runs, without the older ones of an op that was run again."""
    again = read_rows(root / ATTENTION)
    ops = {row["op"] for row in again}
    return [
        *again,
        *(row for row in read_rows(root / BENCHMARK) if row["op"] not in ops),
    ]


def panels(rows: Iterable[Row]) -> list[Panel]:
    """A panel for each op, heads and keys that have more than one number of tokens. A
    wrong result has no point."""
    shapes: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        time = row["graph"] or row["direct"]
        if not time or row["note"].startswith("WRONG"):
            continue
        title = row["op"]
        title += f", {row['heads']} heads" if row["heads"] else ""
        title += f", {int(row['keys']):,} keys" if row["keys"] else ""
        point = Point(int(row["tokens"]), float(time), float(row["% of the roof"] or 0))
        lines = shapes.setdefault(title, {})
        lines.setdefault(row["candidate"], []).append(point)
    found = [
        Panel(title, {name: _sorted(line) for name, line in lines.items()})
        for title, lines in shapes.items()
    ]
    return [one for one in found if len({point.tokens for point in one.points}) > 1]


def plot(title: str, shown: Sequence[Panel]) -> str:
    """The panels for a page, in a box that scrolls; empty without panels."""
    return f'<div class="chart-box">{_svg(title, shown)}</div>' if shown else ""


def picture(title: str, shown: Sequence[Panel]) -> str:
    """The panels as a file of their own, on white."""
    style = "text{font:12px sans-serif}.grid{stroke:#ccc}.unit{font-size:10px}"
    svg = _svg(
        title, shown, f'<style>{style}</style><path fill="#fff" d="M0 0H9999V9999H0z"/>'
    )
    return f"{svg}\n"


def _svg(title: str, shown: Sequence[Panel], first: str = "") -> str:
    names = list(dict.fromkeys(name for panel in shown for name in panel.lines))
    others = iter(_OTHER_COLOURS * len(names))
    colours = {name: _COLOURS.get(name) or next(others) for name in names}
    width = _WIDE * _COLUMNS
    height = _HEAD + _HIGH * -(-len(shown) // _COLUMNS)
    parts = [
        f'<svg class="chart" role="img" viewBox="0 0 {width} {height}"'
        f' aria-label="{html.escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{html.escape(title)}</title>{first}",
    ]
    x = _LEFT
    for name in names:
        parts.append(
            f'<rect x="{x}" y="4" width="12" height="12" fill="{colours[name]}"/>'
            f'<text x="{x + 18}" y="15">{html.escape(name)}</text>'
        )
        x += 36 + 7 * len(name)
    for index, panel in enumerate(shown):
        band, column = divmod(index, _COLUMNS)
        place = f"translate({column * _WIDE} {_HEAD + band * _HIGH})"
        parts += [f'<g transform="{place}">', *_panel(panel, colours), "</g>"]
    return "\n".join([*parts, "</svg>"])


def _panel(panel: Panel, colours: Mapping[str, str]) -> Iterable[str]:
    """Both parts of a panel: time on scales of powers, per cent on a plain one."""
    tokens = sorted({point.tokens for point in panel.points})
    times = [point.time for point in panel.points]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    high = max(high, low + 1)
    first, last = math.log2(tokens[0]), math.log2(tokens[-1])

    def x(point: Point | int) -> float:
        number = point if isinstance(point, int) else point.tokens
        share = (math.log2(number) - first) / (last - first)
        return _LEFT + 8 + share * (_RIGHT - _LEFT - 16)

    def time(point: Point) -> float:
        share = (math.log10(point.time) - low) / (high - low)
        return _BOTTOM - share * (_BOTTOM - _TOP)

    def percent(point: Point) -> float:
        return _ZERO - min(point.percent, 100) / 100 * (_ZERO - _FULL)

    yield _text(_LEFT - 42, 12, "start", html.escape(panel.title))
    for power in range(low, high + 1):
        y = _BOTTOM - (power - low) / (high - low) * (_BOTTOM - _TOP)
        yield from _rule(y, f"{10**power:,g}" + (" µs" if power == high else ""))
    for share in (0, 50, 100):
        y = _ZERO - share / 100 * (_ZERO - _FULL)
        yield from _rule(y, f"{share}" + (" %" if share == 100 else ""))
    for number in tokens:
        yield _text(x(number), _ZERO + 14, "middle", f"{number:,}")
    yield _text(_LEFT - 6, _ZERO + 14, "end", "tokens")
    for name, line in panel.lines.items():
        for height in (time, percent):
            places = [(x(point), height(point)) for point in line]
            drawn = " ".join(f"{left:.1f},{down:.1f}" for left, down in places)
            yield (
                f'<polyline points="{drawn}" fill="none" stroke="{colours[name]}"'
                f' stroke-width="{2.5 if name == "ours" else 1.5}"/>'
            )
            for point, (left, down) in zip(line, places, strict=True):
                yield (
                    f'<circle cx="{left:.1f}" cy="{down:.1f}" r="3"'
                    f' fill="{colours[name]}"><title>{html.escape(name)},'
                    f" {point.tokens:,} tokens: {point.time:,g} µs,"
                    f" {point.percent:g} % of the roof</title></circle>"
                )


def _rule(y: float, label: str) -> Iterable[str]:
    yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>'
    yield _text(_LEFT - 6, y + 4, "end", label)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return (
        f'<text class="unit" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{text}</text>"
    )


def _sorted(line: Iterable[Point]) -> list[Point]:
    return sorted(line, key=lambda point: point.tokens)
