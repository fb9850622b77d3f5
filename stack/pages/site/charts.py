# SPDX-License-Identifier: Apache-2.0
"""The charts above the tables of rows, as SVG that pygal draws."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10

import pygal
from pygal.style import Style

Rows = Sequence[dict[str, str]]
_DEVICE = "bmg"
_MOST = 10
"""Labels of a chart: twenty bars of two groups."""
_WORDS = {
    "candidates": "candidate blocks",
    "decode": "decode attention",
    "gather": "pages to rows",
    "indexer_q": "indexer queries",
    "insert": "insert into the cache",
    "inv_rope": "inverse RoPE",
    "logits": "indexer scores",
    "mhc": "hyper-connections",
    "norm": "norms of drafts",
    "mxfp8": "rows in MXFP8",
    "nvfp4": "NVFP4 weights",
    "prefill": "prefill attention",
    "range prefill": "prefill attention, few heads",
    "topk": "chosen keys",
}
"""What people call an operation of the rows."""
_OURS = ("ours", "patched", "This stack")
_COLOUR = "#0b6bcb"
_COLOURS = ("#c2410c", "#2a8c3c", "#888888", "#9b59d0")
"""Of ours, and of the others."""


@dataclass
class Chart:
    """A value for each label of each group, as bars or as lines.

    Attributes:
        unit: what a value counts.
        lines: over labels that are numbers of tokens, on a logarithmic scale.
    """

    title: str
    unit: str
    lines: bool = False
    groups: dict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def labels(self) -> list[str]:
        """Those of all groups: of lines by number, of bars in the order of the rows."""
        labels = list(
            dict.fromkeys(label for of in self.groups.values() for label in of)
        )
        return sorted(labels, key=int) if self.lines else labels

    def svg(self) -> str:
        """The chart as a file of its own, which needs no script."""
        labels = self.labels()
        others = iter(_COLOURS)
        colours = [
            _COLOUR if name in _OURS else next(others, "black") for name in self.groups
        ]
        kind = pygal.Line if self.lines else pygal.HorizontalBar
        chart = kind(
            title=self.title,
            js=(),
            explicit_size=True,
            width=380 if self.lines else 900,
            height=330 if self.lines else 140 + 16 * len(labels) * len(self.groups),
            legend_at_bottom=True,
            truncate_legend=-1,
            logarithmic=self.lines,
            print_values=not self.lines,
            x_title="tokens" if self.lines else self.unit,
            y_title=self.unit if self.lines else None,
            style=Style(
                background="white",
                plot_background="white",
                colors=colours,
                font_family="sans-serif",
                value_font_size=11,
            ),
        )
        # The first bar is the lowest.
        shown = labels if self.lines else labels[::-1]
        chart.x_labels = shown
        if self.lines:
            points = [value for of in self.groups.values() for value in of.values()]
            low, high = floor(log10(min(points))), ceil(log10(max(points)))
            chart.y_labels = [10**power for power in range(low, high + 1)]
        for name, values in self.groups.items():
            chart.add(name, [values.get(label) for label in shown])
        return str(chart.render(is_unicode=True))


def machine_code(rows: Rows) -> Iterable[Chart]:
    """Upstream's newest release beside this stack: of each operation the costliest
    kernel, and of those the costliest operations first."""
    releases = (row["by"] for row in rows if row["by"].startswith("Upstream"))
    shown = (*list(dict.fromkeys(releases))[-1:], "This stack")
    for title, key, unit in (
        ("Instructions of one turn of the longest loop", "loop", "instructions"),
        ("Bytes that registers cannot hold", "spill", "bytes of a hardware thread"),
    ):
        chart = Chart(f"{title}: the costliest kernel, on an Arc Pro B60", unit)
        mine = [
            row
            for row in rows
            if row["by"] in shown and row["device"] == _DEVICE and float(row[key]) > 0
        ]
        mine.sort(key=lambda row: -float(row[key]))
        labels = list(dict.fromkeys(_WORDS.get(row["op"], row["op"]) for row in mine))
        for row in mine:
            if (label := _WORDS.get(row["op"], row["op"])) in labels[:_MOST]:
                chart.groups[row["by"]].setdefault(label, float(row[key]))
        yield chart


def benchmark(rows: Rows) -> Iterable[Chart]:
    """Time over tokens for each operation, heads and keys that have several numbers of
    tokens. A wrong result has no point."""
    charts: dict[tuple[str, str, str], Chart] = {}
    for row in rows:
        time = row["graph"] or row["direct"]
        if not time or row["note"].startswith("WRONG"):
            continue
        op, heads, keys = shape = row["op"], row["heads"], row["keys"]
        title = _WORDS.get(op, op) + (f", {heads} heads" if heads else "")
        title += f", {int(keys):,} keys" if keys else ""
        chart = charts.setdefault(shape, Chart(title, "microseconds", lines=True))
        chart.groups[row["candidate"]][row["tokens"]] = float(time)
    return (chart for chart in charts.values() if len(chart.labels()) > 1)


CHARTS: dict[str, Callable[[Rows], Iterable[Chart]]] = {
    "machine_code.csv": machine_code,
    "benchmark.csv": benchmark,
}
"""What makes charts of a file of `docs/data`."""
