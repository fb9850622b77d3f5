# SPDX-License-Identifier: Apache-2.0
"""Prints a report for people: the table, what failed and why, and the last line."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stack.series.result import KINDS, Report, Result

STYLE = {"passed": "green", "failed": "bold red", "blocked": "yellow"}
_TAIL = 60


def show(report: Report, console: Console, verbose: bool = False) -> None:
    """Print the report; its last line is `N passed, N failed`.

    Args:
        verbose: a row for every step, also if all its checks are green and cached.
    """
    if report.results:
        console.print(table(report, verbose))
    failed = (result for result in report.results if result.status != "passed")
    for line in chain.from_iterable(map(failure, failed)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for note, count in Counter(_notes(report.results)).items():
        times = f" ({count} checks)" if count > 1 else ""
        console.print(f"note: {note}{times}", markup=False, highlight=False)
    if any(result.kind == "lint" for result in report.results):
        line = f"types checked by mypy: {typed(report.results) or 'none'}"
        console.print(line, soft_wrap=True, highlight=False)
    if report.not_run:
        console.print(f"stopped early: {report.not_run} not run", highlight=False)
    cached = sum(result.cached for result in report.results)
    console.print(
        f"{report.seconds:.1f} s, {cached} of {len(report.results)} from the cache",
        markup=False,
        highlight=False,
    )
    console.print(f"{report.passed} passed, {report.failed} failed", highlight=False)


def table(report: Report, verbose: bool = False) -> Table:
    """Release by step, one column per kind of check; `*` marks what was cached.

    Unless `verbose`, the steps of a release whose checks are all green and cached
    are one row."""
    grid = Table(caption="* from the cache", caption_justify="left")
    for name in ("release", "step"):
        grid.add_column(name, no_wrap=True)
    for kind in KINDS:
        grid.add_column(kind, no_wrap=True)
    grid.add_column("time", justify="right", no_wrap=True)
    releases: dict[str, dict[str, list[Result]]] = {}
    for result in report.results:
        steps = releases.setdefault(result.release, {})
        steps.setdefault(result.step, []).append(result)
    for release, steps in releases.items():
        if grid.row_count:
            grid.add_section()
        for number, row in enumerate(_rows(steps, verbose)):
            grid.add_row("" if number else release, *row)
    return grid


def typed(results: Iterable[Result]) -> str:
    """The trees that mypy read, such as `v0.32.0 tip; v0.33.0 33 steps, tip`."""
    trees: dict[str, list[str]] = {}
    for result in results:
        if result.typed:
            trees.setdefault(result.release, []).append(result.step)
    parts = []
    for release, names in trees.items():
        steps = [name for name in names if name != "tip"]
        words = [f"{len(steps)} steps"] if len(steps) > 1 else steps
        tip = ["tip"] if "tip" in names else []
        parts.append(f"{release} {', '.join([*words, *tip])}")
    return "; ".join(parts)


def failure(result: Result) -> Iterator[str]:
    """The lines of a failure: its last lines of output, the command that repeats it."""
    where = f"{result.release} {result.step} {result.kind}"
    yield f"\n{result.status.upper()} {where}: {result.summary}"
    yield from (f"  {line}" for line in result.detail[-_TAIL:])
    if result.status == "failed":
        yield f"  by hand: {result.command}"


def _rows(
    steps: dict[str, list[Result]], verbose: bool
) -> Iterator[tuple[str | Text, ...]]:
    quiet = [
        step
        for step, results in steps.items()
        if all(result.cached and result.status == "passed" for result in results)
    ]
    together = [] if verbose or len(quiet) < 2 else quiet
    for step, results in steps.items():
        if step not in together:
            cells = [_cell(results, kind) for kind in KINDS]
            seconds = sum(result.seconds for result in results if not result.cached)
            yield (step, *cells, f"{seconds:.1f} s" if seconds else "-")
    if together:
        which = "all" if len(together) == len(steps) else "other"
        cached = [result for step in together for result in steps[step]]
        counts = [_count(cached, kind) for kind in KINDS]
        yield (f"{which} {len(together)}", *counts, "-")


def _count(cached: Sequence[Result], kind: str) -> Text:
    count = sum(result.kind == kind for result in cached)
    return Text(f"{count} passed *", STYLE["passed"]) if count else Text("-", "dim")


def _cell(results: list[Result], kind: str) -> Text:
    """The result of one kind; the first column shows a failed `apply` or `static`
    instead, if there is one."""
    broken = [result for result in results if result.kind in ("apply", "static")]
    if broken and kind == KINDS[0]:
        return Text(f"{broken[0].kind} {broken[0].status}", STYLE[broken[0].status])
    for result in results:
        if result.kind == kind:
            mark = " *" if result.cached else ""
            return Text(result.status + mark, STYLE[result.status])
    return Text("-", "dim")


def _notes(results: Iterable[Result]) -> Iterator[str]:
    for result in results:
        about = result.step if result.kind == "test" else result.kind
        yield from (f"{result.release} {about}: {note}" for note in result.notes)
