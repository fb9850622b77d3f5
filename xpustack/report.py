# SPDX-License-Identifier: Apache-2.0
"""A report for people: the table, what failed and why, and the last line."""

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xpustack.results import KINDS, Report, Result

_STYLE = {"passed": "green", "failed": "bold red", "blocked": "yellow"}
_TAIL = 60


def show(report: Report, console: Console) -> None:
    """Print the report; its last line is `N passed, N failed`."""
    if report.results:
        console.print(table(report))
    for line in failures(report.results):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for note, count in Counter(_notes(report.results)).items():
        times = f" ({count} checks)" if count > 1 else ""
        console.print(f"note: {note}{times}", markup=False, highlight=False)
    cached = sum(result.cached for result in report.results)
    console.print(
        f"{report.seconds:.1f} s, {cached} of {len(report.results)} from the cache",
        markup=False,
        highlight=False,
    )
    console.print(f"{report.passed} passed, {report.failed} failed", highlight=False)


def table(report: Report) -> Table:
    """Release by step, one column a kind of check; `*` marks what was cached."""
    grid = Table(caption="* from the cache", caption_justify="left")
    for name in ("release", "step"):
        grid.add_column(name, no_wrap=True)
    for kind in KINDS:
        grid.add_column(kind, no_wrap=True)
    grid.add_column("time", justify="right", no_wrap=True)
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in report.results:
        rows.setdefault((result.release, result.step), []).append(result)
    previous = None
    for (release, step), results in rows.items():
        if previous not in (None, release):
            grid.add_section()
        shown = release if release != previous else ""
        previous = release
        cells = [_cell(results, kind) for kind in KINDS]
        seconds = sum(result.seconds for result in results if not result.cached)
        grid.add_row(shown, step, *cells, f"{seconds:.1f} s" if seconds else "-")
    return grid


def failures(results: Iterable[Result]) -> Iterator[str]:
    """Each failure with its last lines and the command that repeats it."""
    for result in results:
        if result.status == "passed":
            continue
        where = f"{result.release} {result.step} {result.kind}"
        yield f"\n{result.status.upper()} {where}: {result.summary}"
        yield from (f"  {line}" for line in result.detail[-_TAIL:])
        if result.status == "failed":
            yield f"  by hand: {result.command}"


def _cell(results: list[Result], kind: str) -> Text:
    """The result of one kind; a release or step that does not apply, or is
    malformed, says so in the first column."""
    broken = [r for r in results if r.kind in ("apply", "static")]
    if broken and kind == KINDS[0]:
        return Text(f"{broken[0].kind} {broken[0].status}", _STYLE[broken[0].status])
    for result in results:
        if result.kind == kind:
            mark = " *" if result.cached else ""
            return Text(result.status + mark, _STYLE[result.status])
    return Text("-", "dim")


def _notes(results: Iterable[Result]) -> Iterator[str]:
    for result in results:
        for note in result.notes:
            if result.kind == "test":
                yield f"{result.release} {result.step}: {note}"
            else:
                yield f"{result.release} {result.kind}: {note}"
