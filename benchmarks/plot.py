# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.plot`: write the rows of a finished run and draw the picture.

Reads `benchmark.json`; with `--redraw` only the rows that `docs/data` has. The picture
shows the newest rows of each op. No package is needed, so it runs on another machine
than the one that measured. `draw`, which a device's report has, needs matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xpustack.core.errors import UsageError
from xpustack.core.markdown import with_section
from xpustack.core.rows import csv_text
from xpustack.pages.site import plots

Row = dict[str, Any]
"""A `benchmarks.run.Measurement`, as the report has it."""
MARKERS = {
    "ours": "o",
    "vllm-xpu-kernels": "D",
    "upstream 0.33.0": "s",
    "FlashMLA": "^",
    "torch": "x",
}
COLORS = {
    "ours": "#0060a9",
    "vllm-xpu-kernels": "#7a3fa0",
    "upstream 0.33.0": "#c04000",
    "FlashMLA": "#2a8c3c",
    "torch": "#888888",
}
COLUMNS = 4
SECTION = "benchmark"
"""The generated section of the page."""
ROWS = "data/benchmark.csv"
"""The file of rows beside the page."""
PICTURE = "benchmark.svg"
"""The picture beside the page."""
HEADS = (
    "op",
    "tokens",
    "heads",
    "keys",
    "candidate",
    "graph",
    "direct",
    "% of the roof",
    "time / ours",
    "note",
)
FIGURES = (
    ("captured", 1),
    ("direct", 1),
    ("percent_of_roof", 0),
    ("speedup_of_ours", 2),
)
"""The figures of the rows and their decimals."""


def best(row: Row) -> float | None:
    """The figure that counts: captured where there is one."""
    return row["direct"] if row["captured"] is None else row["captured"]


def panels(rows: Sequence[Row]) -> dict[tuple[str, int, int], list[Row]]:
    """Rows by op, heads and keys, where more than one token count was measured."""
    shapes: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        shapes.setdefault((row["op"], row["heads"], row["keys"]), []).append(row)
    return {
        shape: part
        for shape, part in shapes.items()
        if len({row["tokens"] for row in part}) > 1
    }


def draw(report: dict[str, Any], target: Path) -> None:
    """Draw time over tokens, and below it per cent of the roof, for each shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = panels(report["rows"])
    bands = -(-len(shapes) // COLUMNS)
    figure, axes = pyplot.subplots(
        2 * bands, COLUMNS, figsize=(3.2 * COLUMNS, 5.4 * bands), squeeze=False
    )
    for index, ((op, heads, keys), part) in enumerate(shapes.items()):
        band, column = divmod(index, COLUMNS)
        above, below = axes[2 * band][column], axes[2 * band + 1][column]
        title = op + (f" H{heads}" if heads else "") + (f" K{keys}" if keys else "")
        above.set_title(title, fontsize=9)
        for name in dict.fromkeys(row["candidate"] for row in part):
            own = [r for r in part if r["candidate"] == name and best(r)]
            style = {"marker": MARKERS.get(name, "."), "color": COLORS.get(name, "k")}
            tokens = [row["tokens"] for row in own]
            above.loglog(tokens, [best(row) for row in own], label=name, **style)
            percent = [row["percent_of_roof"] for row in own]
            below.semilogx(tokens, percent, label=name, **style)
        roof = sorted({(row["tokens"], row["roof"]) for row in part})
        above.loglog(*zip(*roof, strict=True), "k:", label="roof")
        for axis in (above, below):
            axis.set_xticks([tokens for tokens, _ in roof], minor=False)
            axis.set_xticks([], minor=True)
            axis.set_xticklabels([str(tokens) for tokens, _ in roof])
        below.set_ylim(0, 100)
        below.set_xlabel("tokens")
    for axis in axes.flat[:: COLUMNS * 2]:
        axis.set_ylabel("µs per call")
    for axis in axes.flat[COLUMNS :: COLUMNS * 2]:
        axis.set_ylabel("% of the roof")
    for index in range(len(shapes), bands * COLUMNS):
        band, column = divmod(index, COLUMNS)
        axes[2 * band][column].set_axis_off()
        axes[2 * band + 1][column].set_axis_off()
    axes[0][0].legend(fontsize=7)
    facts = report["environment"]
    figure.suptitle(
        f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}"
    )
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def section(report: dict[str, Any]) -> str:
    """The device, the versions and the file of rows of a run, in a line of Markdown."""
    facts, roof = report["environment"], report["roofline"]
    return (
        f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}, "
        f"{facts['time']}: copy {roof['bandwidth'] / 1e12:.2f} TB/s, bf16 product "
        f"{roof['matrix'] / 1e12:.0f} TFLOP/s. The {len(report['rows'])} rows are in "
        f"[{ROWS}]({ROWS}): medians in µs."
    )


def csv_row(row: Row) -> dict[str, object]:
    """A row of the file; an empty cell has no figure."""
    figures = (
        "" if row[name] is None else f"{row[name]:.{digits}f}"
        for name, digits in FIGURES
    )
    cells = (
        row["op"],
        row["tokens"],
        row["heads"] or "",
        row["keys"] or "",
        row["candidate"],
        *figures,
        f"WRONG: {row['wrong']}" if row["wrong"] else row["note"],
    )
    return dict(zip(HEADS, cells, strict=True))


def picture_text(root: Path) -> str:
    """The picture of the rows that a folder's `docs/data` has."""
    shown = plots.panels(plots.newest_rows(root))
    return plots.picture("Time over tokens and per cent of the roof", shown)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=__doc__
    )
    parser.add_argument(
        "report", type=Path, nargs="?", default=Path(".bench/results/benchmark.json")
    )
    parser.add_argument("--docs", type=Path, default=Path("docs/kernels.md"))
    parser.add_argument(
        "--redraw", action="store_true", help="draw the rows of docs/data again"
    )
    options = parser.parse_args(arguments)
    picture = options.docs.parent / PICTURE
    if options.redraw:
        picture.write_text(picture_text(options.docs.parent.parent))
        return 0
    report = json.loads(options.report.read_text())
    try:
        text = with_section(options.docs, SECTION, section(report))
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    options.docs.write_text(text)
    rows = options.docs.parent / ROWS
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text(csv_text([csv_row(row) for row in report["rows"]]))
    picture.write_text(picture_text(options.docs.parent.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
