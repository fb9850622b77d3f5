# SPDX-License-Identifier: Apache-2.0
"""What all commands share: options, tables or JSON, errors, progress."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.table import Table

from xpustack.errors import INTERRUPTED, StackError, explained
from xpustack.progress import Progress

EXIT_CODES = (
    "Exit codes: 0 all well, 1 a check failed, 2 wrong usage, 3 a pin or its"
    " archive, 4 a series or a patch that does not apply, 5 the machine (a missing"
    " tool, a full disk, a damaged cache), 70 a fault of the tool itself,"
    " 130 interrupted."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Offline = Annotated[bool, typer.Option(help="Use the cache alone, no network.")]


def print_rows(
    as_json: bool, data: object, rows: list[dict[str, Any]], columns: tuple[str, ...]
) -> None:
    """Print `data` as JSON, or the `columns` of `rows` as a table."""
    if as_json:
        print(json.dumps(data, indent=1))
        return
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def say_all(problems: list[StackError]) -> None:
    """Print each problem as a readable block on stderr."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)


@contextlib.contextmanager
def reporting_errors(as_json: bool) -> Iterator[None]:
    """Turn failures into a readable block, or JSON, and their exit code. Whatever
    nobody foresaw ends here as well: never as a traceback with the exit code 1,
    which says that a check failed."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: nothing half-done is left", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort, click.ClickException, BrokenPipeError):
        raise
    except Exception as error:
        problem = error if isinstance(error, StackError) else explained(error)
        if as_json:
            print(json.dumps(problem.to_json()))
        else:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(problem.exit_code) from error


@contextlib.contextmanager
def showing_progress() -> Iterator[Progress]:
    """A live line on a terminal, plain lines elsewhere; always on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda message: print(message, file=sys.stderr, flush=True)
        return
    with console.status("starting") as live:

        def say(message: str) -> None:
            console.print(message, markup=False, highlight=False)
            live.update(message.replace("[", r"\["))

        yield say
