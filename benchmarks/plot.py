# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.plot`: the picture and the table of a finished run.

Reads `benchmark.json`; needs matplotlib for the picture and nothing for the table, so
it runs where the results are brought to, not where they were measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MARKERS = {"ours": "o", "upstream 0.33.0": "s", "FlashMLA": "^", "torch": "x"}
COLORS = {
    "ours": "#0060a9",
    "upstream 0.33.0": "#c04000",
    "FlashMLA": "#2a8c3c",
    "torch": "#888888",
}
COLUMNS = 4
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"


def best(row: Row) -> float | None:
    """The figure that counts: captured where there is one."""
    return row["direct"] if row["captured"] is None else row["captured"]


def panels(rows: Sequence[Row]) -> dict[tuple[str, int, int], list[Row]]:
    """Rows by op, heads and keys, where more than one token count was measured."""
    found: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["op"], row["heads"], row["keys"]), []).append(row)
    return {
        key: part for key, part in found.items() if len({r["tokens"] for r in part}) > 1
    }


def draw(report: dict[str, Any], target: Path) -> None:
    """Time over tokens, below it per cent of the roof, for each shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = panels(report["rows"])
    bands = -(-len(found) // COLUMNS)
    figure, axes = pyplot.subplots(
        2 * bands, COLUMNS, figsize=(3.2 * COLUMNS, 5.4 * bands), squeeze=False
    )
    for index, ((op, heads, keys), part) in enumerate(found.items()):
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
        axis.set_ylabel("µs a call")
    for axis in axes.flat[COLUMNS :: COLUMNS * 2]:
        axis.set_ylabel("% of the roof")
    for index in range(len(found), bands * COLUMNS):
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


def table(report: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    facts, roof = report["environment"], report["roofline"]
    lines = [
        f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}, "
        f"{facts['time']}: copy {roof['bandwidth'] / 1e12:.2f} TB/s, bf16 product "
        f"{roof['matrix'] / 1e12:.0f} TFLOP/s. Medians in µs.",
        "",
        "| op | tokens | heads | keys | candidate | graph | direct | % of the roof | "
        "time / ours | note |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        note = f"WRONG: {row['wrong']}" if row["wrong"] else row["note"]
        figures = [
            "-" if row[name] is None else f"{row[name]:.{digits}f}"
            for name, digits in (
                ("captured", 1),
                ("direct", 1),
                ("percent_of_roof", 0),
                ("speedup_of_ours", 2),
            )
        ]
        lines.append(
            f"| {row['op']} | {row['tokens']} | {row['heads'] or '-'} | "
            f"{row['keys'] or '-'} | {row['candidate']} | {' | '.join(figures)} | "
            f"{note} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=__doc__
    )
    parser.add_argument(
        "report", type=Path, nargs="?", default=Path(".bench/results/benchmark.json")
    )
    parser.add_argument("--picture", type=Path, default=Path("docs/benchmark.svg"))
    parser.add_argument("--docs", type=Path, default=Path("docs/kernels.md"))
    chosen = parser.parse_args(arguments)
    report = json.loads(chosen.report.read_text())
    text = chosen.docs.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{chosen.docs} lacks {BEGIN} or {END}", file=sys.stderr)
        return 4
    chosen.docs.write_text(f"{before}{BEGIN}\n{table(report)}\n{END}{after}")
    if panels(report["rows"]):
        draw(report, chosen.picture)
    else:
        print("no shape was measured at two token counts: no picture", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
