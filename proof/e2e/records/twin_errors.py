# SPDX-License-Identifier: Apache-2.0
"""How far V4 Vision and V4.1 are from their float32 twins, whatever is asked of them:
the record that `tests/proof/e2e` writes, and the tables made of it."""

from collections.abc import Iterable, Mapping, Sequence

from proof.e2e.records.order import Row, newest_first
from stack.core import markdown
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages import record
from stack.pages.made import stamp

PAGE = "docs/e2e.md"
DATA = "docs/data/twins.csv"

SECTIONS = {"vision": "vision", "v41": "v4.1"}
"""The page's tables, and how the names of their checkpoints begin."""
FIGURES = {
    "core": "core %",
    "output": "output %",
    "plain": "float32 %",
    "experts": "experts %",
    "streams": "streams %",
    "missed": "other choice %",
}
"""The columns by the names that the checks give to their figures."""
SHOWN = ("core", "output", "experts", "streams")
"""The figures that the page's tables have, beside that of the logits."""
LOGITS = "logits"


def rows_of(
    release: str, checkpoint: str, job: str, figures: Mapping[str, Mapping[str, float]]
) -> list[Row]:
    """A row for each layer, and for the logits, of what the checks found."""
    return [
        {
            "release": release,
            "checkpoint": checkpoint,
            "job": job,
            "layer": layer,
            "ratio": int(found["ratio"]) if "ratio" in found else "",
        }
        | {
            column: f"{100 * found[name]:.2f}" if name in found else ""
            for name, column in FIGURES.items()
        }
        for layer, found in figures.items()
    ]


def keep(project: Project, rows: Sequence[Row]) -> None:
    """Put the rows of jobs into the record, in place of those before them, and write
    the page."""
    rows = [{**row, **stamp(project, str(row["release"]))} for row in rows]
    anew = {(row["release"], row["job"]) for row in rows}
    known = read_rows(project.root / DATA)
    kept = [*(row for row in known if (row["release"], row["job"]) not in anew), *rows]
    jobs = sorted({(str(row["checkpoint"]), str(row["job"])) for row in kept})
    ordered = newest_first(
        project,
        kept,
        lambda row: (
            jobs.index((str(row["checkpoint"]), str(row["job"]))),
            len(kept) if row["layer"] == LOGITS else int(str(row["layer"])),
        ),
    )
    for section in SECTIONS:
        shown = render(ordered, section)
        record.write(project, DATA, ordered, PAGE, (section, shown))


def render(rows: Iterable[Row], section: str) -> str:
    """The largest figures of each job; releases with the same figures share a line.
    Columns without a figure are left out."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if str(row["checkpoint"]).startswith(SECTIONS[section]):
            job, release = str(row["job"]), str(row["release"])
            found.setdefault(job, {}).setdefault(release, []).append(row)
    alike: dict[tuple[str, ...], list[str]] = {}
    for job, by_release in found.items():
        for release, own in by_release.items():
            alike.setdefault((job, *_largest(own)), []).append(release)
    lines = [(job, ", ".join(of), *figures) for (job, *figures), of in alike.items()]
    heads = [
        "asked",
        "releases",
        *(FIGURES[name] for name in SHOWN),
        "logits, float32 %",
    ]
    # V4 has no `streams`.
    used = [place for place in range(len(heads)) if any(row[place] for row in lines)]
    return markdown.table(
        [heads[place] for place in used],
        ([row[place] for place in used] for row in lines),
    )


def _largest(rows: Sequence[Row]) -> list[str]:
    def worst(column: str, logits: bool) -> str:
        figures = [
            float(str(row[column]))
            for row in rows
            if row[column] and (row["layer"] == LOGITS) is logits
        ]
        return f"{max(figures):.2f}" if figures else ""

    own = [worst(FIGURES[name], logits=False) for name in SHOWN]
    return [*own, worst(FIGURES["plain"], logits=True)]
