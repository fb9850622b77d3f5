# SPDX-License-Identifier: Apache-2.0
"""Shows a run of checks: one line per check that ended, and what still runs. A terminal
shows that in a live line, other outputs get a line of it now and then."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from stack.checks.schedule import Observer, Task
from stack.series.result import Result
from stack.terminal.report import STYLE, failure

_QUIET = 30.0


class Display(Observer):
    """An observer that prints to `console`; `live` is its live line."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._clock = console, clock
        self._last_line = clock()
        self._running: dict[Task, float] = {}
        self._open: Counter[str] = Counter()
        self._cached: Counter[str] = Counter()
        self._failed = False
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        what = TextColumn("{task.description}", markup=False)
        self.live = Progress(*columns, what, console=console, transient=True)
        self._line = self.live.add_task("starting", total=None)

    def message(self, text: str) -> None:
        """Show a message of the work; on a terminal in the live line until checks
        run."""
        if self._open or not self._console.is_terminal:
            self._print(text)
        else:
            self.live.update(self._line, description=text)

    def planned(self, checks: Sequence[Task]) -> None:
        self._open.update(check.release for check in checks)
        self.live.update(self._line, total=len(checks))

    def started(self, check: Task) -> None:
        self._running[check] = self._clock()
        self._show_running()

    def finished(self, check: Task, result: Result) -> None:
        self._running.pop(check, None)
        self._open[check.release] -= 1
        self.live.advance(self._line)
        self._show_running()
        if result.cached:
            self._cached[check.release] += check.shown
        else:
            self._print_result(check, result)
        count = self._cached[check.release]
        if count and not self._open[check.release]:
            noun = "check" if count == 1 else "checks"
            self._print(f"{check.release}: {count} {noun} from the cache")

    def waiting(self) -> None:
        now = self._clock()
        if not self._console.is_terminal and now - self._last_line >= _QUIET:
            running = ", ".join(
                f"{check} ({now - since:.0f} s)"
                for check, since in self._running.items()
            )
            self._print(f"still running: {running}; {self._count()} ended")

    def _show_running(self) -> None:
        running = ", ".join(map(str, self._running)) or "finishing"
        self.live.update(self._line, description=running)

    def _print_result(self, check: Task, result: Result) -> None:
        spent = f", {result.seconds:.0f} s" if result.seconds else ""
        line = Text(f"[{self._count()}] {check}: ")
        line.append(result.status, STYLE[result.status]).append(spent)
        self._print(line)
        if result.status == "failed" and not self._failed:
            self._failed = True
            self._print("\n".join(failure(result)))

    def _count(self) -> str:
        task = self.live.tasks[0]
        return f"{task.completed:.0f}/{task.total or 0:.0f}"

    def _print(self, line: str | Text) -> None:
        self._last_line = self._clock()
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)
