# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.plot`: write the rows of a finished run and draw the picture.

Reads `benchmark.json`; with `--redraw` only the rows that `docs/data` has. The picture
shows the newest rows of each op. No package is needed, so it runs on another machine
than the one that measured.
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


def draw(report: dict[str, Any], target: Path) -> None:
    """Write the picture of a run, if it has a shape of several counts of tokens."""
    rows = [
        {head: str(cell) for head, cell in csv_row(row).items()}
        for row in report["rows"]
    ]
    facts = report["environment"]
    title = f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}"
    if shown := plots.panels(rows):
        target.write_text(plots.picture(title, shown))


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
