# SPDX-License-Identifier: Apache-2.0
"""The display of a run of checks, on a terminal and elsewhere."""

import io
import re

from rich.console import Console

from stack.checks.schedule import Task
from stack.series.result import Result
from stack.terminal.display import Display

OLD = [
    Task("v1.0", step, kind)
    for step in ("a", "b", "c")
    for kind in ("build", "lint", "test")
]
NEW = [Task("v2.0", "a", "build"), Task("v2.0", "a", "test")]


class Screen:
    """A display that writes to a string, with a clock that the test sets."""

    def __init__(self, terminal: bool = False) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.console = Console(file=self.stream, force_terminal=terminal, width=80)
        self.display = Display(self.console, lambda: self.now)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def cached(self, check: Task) -> None:
        self.display.started(check)
        result = Result(check.release, check.step, check.kind, "passed", 9.0, True)
        self.display.finished(check, result)

    def ended(self, check: Task, seconds: float, status="passed", **extra) -> None:
        self.now += seconds
        result = Result(check.release, check.step, check.kind, status, seconds, **extra)
        self.display.finished(check, result)


def test_cached_checks_are_one_line_a_release():
    screen = Screen()
    screen.display.planned([*OLD, *NEW])
    for check in OLD:
        screen.cached(check)
    assert screen.lines == ["v1.0: 9 checks from the cache"]
    screen.cached(NEW[0])
    screen.display.started(NEW[1])
    screen.ended(NEW[1], 75.0)
    assert screen.lines[1:] == [
        "[11/11] v2.0 a test: passed, 75 s",
        "v2.0: 1 check from the cache",
    ]


def test_checks_that_only_serve_others_are_not_counted_as_cached():
    screen = Screen()
    hidden = Task("v2.0", "base", "build", shown=False)
    screen.display.planned([hidden, NEW[1]])
    screen.cached(hidden)
    screen.cached(NEW[1])
    assert screen.lines == ["v2.0: 1 check from the cache"]


def test_the_first_failure_is_shown_at_once_and_only_the_first():
    screen = Screen()
    screen.display.planned([*NEW, *OLD])
    screen.ended(NEW[1], 2.0, "failed", summary="2 tests", detail=("why [x]",))
    screen.ended(OLD[1], 2.0, "failed", summary="1 new", detail=("other",))
    screen.ended(OLD[2], 0.0, "blocked", summary="a build did not pass")
    assert screen.lines == [
        "[1/11] v2.0 a test: failed, 2 s",
        "",
        "FAILED v2.0 a test: 2 tests",
        "  why [x]",
        "  by hand: xpustack check v2.0 a --only test",
        "[2/11] v1.0 a lint: failed, 2 s",
        "[3/11] v1.0 a test: blocked",
    ]


def test_a_quiet_run_says_every_half_minute_what_still_runs():
    screen = Screen()
    screen.display.planned(OLD[:3])
    screen.display.started(OLD[0])
    for second in range(1, 61):
        screen.now = float(second)
        screen.display.waiting()
    assert screen.lines == [
        "still running: v1.0 a build (30 s); 0/3 ended",
        "still running: v1.0 a build (60 s); 0/3 ended",
    ]
    screen.ended(OLD[0], 10.0)
    screen.display.started(OLD[1])
    screen.now += 29.0
    screen.display.waiting()
    assert len(screen.lines) == 3


def test_the_live_line_is_one_line_and_says_what_runs():
    screen = Screen(terminal=True)
    screen.display.message("applying v1.0 [a]")
    assert "applying v1.0 [a]" in live_line(screen)
    screen.display.planned([*OLD, *NEW])
    for check in OLD[:2]:
        screen.display.started(check)
    screen.cached(OLD[2])
    line = live_line(screen)
    assert re.fullmatch(r" *1/11 .* v1.0 a build, v1.0 a lint *\n", line)
    for check in OLD[3:]:
        screen.display.started(check)
    assert live_line(screen).count("\n") == 1


def live_line(screen: Screen) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(screen.display.live.get_renderable())
    return captured.get()


def test_messages_are_lines_where_there_is_no_terminal():
    plain, live = Screen(), Screen(terminal=True)
    for screen in (plain, live):
        screen.display.message("importing v1.0")
    assert (plain.lines, live.lines) == (["importing v1.0"], [])
    live.display.planned(OLD)
    live.display.message("waiting for another run to release objects")
    assert len(live.lines) == 1
