# SPDX-License-Identifier: Apache-2.0
"""What all commands share: options, an answer as text or JSON, errors, progress.

With `--json` a command prints exactly one document on stdout, however it ends:

    {"schema": 1, "command": "check", "ok": false, "exit_code": 1,
     "data": {...}, "errors": [{"error": "CheckFailed", "message": "...", ...}]}

Each command has its own `data`; it is null if the command failed before it had any.
`errors` come from `StackError.to_json`; they are empty if `data` says what is wrong.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from cyclopts import CycloptsError, Parameter, Token, UnusedCliTokensError
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from stack.base.releases import Release, Releases
from stack.core.cache import Cache
from stack.core.errors import Interrupted, StackError, UsageError, stack_error_of
from stack.core.progress import Progress, silent
from stack.core.project import Project
from stack.terminal.display import Display

SCHEMA = 1
EXIT_CODES = (
    "Exit codes: 0 all well, 1 a check failed, 2 wrong usage, 3 a pin or its"
    " archive, 4 a series or a patch that does not apply, 5 the machine (a missing"
    " tool, a full disk, a damaged cache), 70 a fault of the tool itself,"
    " 130 interrupted."
)

Offline = Annotated[bool, Parameter(help="Use the cache alone, no network.")]
ReleaseName = Annotated[str | None, Parameter(help="Such as v0.22.1.")]
AllReleases = Annotated[bool, Parameter("--all", help="Every release.")]


MOST_DIGITS = 18
"""Of a number; Python itself stops at some thousands, in its own words."""


def plain_number(kind: type[float], tokens: Sequence[Token]) -> float:
    """The number of an option. Python takes `1_6` for 16; a person who wrote that meant
    something else. It takes `nan` and `inf`, too, which are above or below no bound."""
    text = tokens[0].value
    try:
        if "_" in text or len(text) > MOST_DIGITS:
            raise ValueError
        number = kind(text)
        if not math.isfinite(number):
            raise ValueError
    except ValueError:
        whole = "a whole number" if kind is int else "a number"
        shown = text if len(text) <= MOST_DIGITS else f"{text[:MOST_DIGITS]}..."
        raise ValueError(f'"{shown}" is not {whole}') from None
    return number


Count = Annotated[int, Parameter(converter=plain_number, validator=Number(gt=0))]
Amount = Annotated[int, Parameter(converter=plain_number, validator=Number(gte=0))]
Share = Annotated[
    float, Parameter(converter=plain_number, validator=Number(gt=0, lte=1))
]


@dataclass
class Answer:
    """What a command prints on stdout, and its exit code.

    Attributes:
        data: the command's part of what `--json` prints.
        exit_code: 0 unless it is set or an error is added.
    """

    command: str
    as_json: bool
    data: object = None
    exit_code: int = 0
    errors: list[StackError] = field(default_factory=list)

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        if not self.as_json:
            for line in lines:
                print(line)

    def table(self, rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> None:
        """Print the `columns` of `rows` as a table for people."""
        if self.as_json:
            return
        table = Table()
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(str(row[column]) for column in columns))
        stdout_console(140).print(table)

    def fail(self, problem: StackError) -> None:
        """Add an error; the first one decides the exit code."""
        self.errors.append(problem)
        self.exit_code = self.exit_code or problem.exit_code

    def end(self, problem: StackError) -> None:
        """Add the error that ends the command, and decides the exit code."""
        self.errors.append(problem)
        self.exit_code = problem.exit_code

    def envelope(self) -> str:
        """The document of `--json`."""
        document = {
            "schema": SCHEMA,
            "command": self.command,
            "ok": self.exit_code == 0,
            "exit_code": self.exit_code,
            "data": self.data,
            "errors": [error.to_json() for error in self.errors],
        }
        return json.dumps(msgspec.to_builtins(document, enc_hook=str), indent=1)


Reply = Annotated[Answer, Parameter(parse=False)]
"""The answer as a command gets it, from no word of the command line."""


@contextlib.contextmanager
def answering(
    command: str, as_json: bool, words: Sequence[str] = ()
) -> Iterator[Answer]:
    """Run a command in the block. At its end print the envelope, or the errors as
    readable blocks on stderr, and exit with the exit code.

    Args:
        words: the command as it was called, of which hints are made.
    """
    answer = Answer(command, as_json)
    try:
        yield answer
    except BrokenPipeError:
        raise
    except CycloptsError as error:
        hint = " ".join(filter(None, ("xpustack", command, "--help")))
        answer.end(UsageError(_said(error), hint=hint))
    except KeyboardInterrupt:
        answer.end(Interrupted("interrupted: nothing half-done is left"))
    except Exception as error:
        answer.end(stack_error_of(error))
    for failure in answer.errors if words else ():
        if failure.again is not None:
            failure.hint = failure.again(words) or failure.hint
    if as_json:
        print(answer.envelope())
    else:
        for failure in answer.errors:
            complain(failure)
    if answer.exit_code:
        sys.exit(answer.exit_code)


def _said(error: CycloptsError) -> str:
    """What is wrong with the words."""
    if isinstance(error, UnusedCliTokensError):
        words = ", ".join(map(repr, error.unused_tokens or ()))
        return f"no place for {words}: an option takes one word, and is repeated"
    said = str(error)
    return said if said.endswith("...") else said.removesuffix(".")


def complain(problem: StackError) -> None:
    """Print an error. Where nobody can be told, the exit code says it alone."""
    try:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    except OSError:
        # What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def stdout_console(width: int) -> Console:
    """A console on stdout; `width` is that of an output that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else width)


@contextlib.contextmanager
def using_cache(offline: bool = False, progress: Progress = silent) -> Iterator[Cache]:
    """The user's cache; `cache gc` removes nothing from it during the block."""
    cache = Cache.default(offline, progress)
    with cache.in_use():
        yield cache


@contextlib.contextmanager
def showing_progress() -> Iterator[Progress]:
    """Show progress on stderr: a live line on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda message: print(message, file=sys.stderr, flush=True)
        return
    with console.status("starting") as live:

        def say(message: str) -> None:
            console.print(message, markup=False, highlight=False)
            live.update(message.replace("[", r"\["))

        yield say


@contextlib.contextmanager
def working(offline: bool = False) -> Iterator[tuple[Project, Cache]]:
    """The project and the user's cache, while progress is shown."""
    with showing_progress() as progress, using_cache(offline, progress) as cache:
        yield Project.find(), cache


@contextlib.contextmanager
def showing_checks() -> Iterator[Display]:
    """The display of a run of checks, on stderr."""
    console = Console(stderr=True)
    display = Display(console)
    with display.live if console.is_terminal else contextlib.nullcontext():
        yield display


def selected(
    pinned: Releases, name: str | None, all_releases: bool, command: str
) -> list[Release]:
    """The release `name`, or all.

    Raises:
        UsageError: neither or both are asked for, or there is no such release.
    """
    if (name is None) is not all_releases:
        raise UsageError(
            "name one RELEASE, or say --all", hint=f"xpustack {command} --help"
        )
    return list(pinned) if name is None else [pinned[name]]
