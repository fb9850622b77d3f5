# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.rows`: write the rows of a finished run, which is in
`benchmark.json`, for the pages.

It needs no torch, so it runs on another machine than the one that measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stack.core.errors import UsageError
from stack.core.markdown import with_section
from stack.core.project import Project
from stack.core.rows import csv_text
from stack.pages.made import stamp

Row = dict[str, Any]
"""A `lab.benchmarks.run.Measurement`, as the report has it."""
ROOT = Path(__file__).resolve().parents[2]
SECTION = "benchmark"
"""The generated section of the page."""
ROWS = "data/benchmark.csv"
"""The file of rows beside the page."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.rows", description=__doc__
    )
    parser.add_argument(
        "report", type=Path, nargs="?", default=Path(".bench/results/benchmark.json")
    )
    parser.add_argument("--docs", type=Path, default=Path("docs/kernels.md"))
    parser.add_argument(
        "--release", default="v0.33.0", help="has the kernels that were measured"
    )
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text())
    try:
        text = with_section(options.docs, SECTION, section(report))
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    options.docs.write_text(text)
    rows = options.docs.parent / ROWS
    rows.parent.mkdir(parents=True, exist_ok=True)
    ran = stamp(Project(ROOT), options.release, report["environment"]["command"])
    release = {"release": options.release}
    rows.write_text(csv_text([release | csv_row(row) | ran for row in report["rows"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
