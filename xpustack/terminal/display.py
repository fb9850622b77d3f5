# SPDX-License-Identifier: Apache-2.0
"""Shows a run of checks: one line per check that ended, and what still runs. A terminal
shows that in a live line, other outputs get a line of it now and then."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from rich.console import Console
from rich.text import Text

from xpustack.checks.observer import Check, Observer
from xpustack.checks.results import Result
from xpustack.terminal.report import STYLE, failure

_QUIET = 30.0


class Display(Observer):
    """An observer that prints to `console`. Rich renders it as the live line."""

    def __init__(
        self,
        console: Console,
        jobs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._jobs, self._clock = console, jobs, clock
        self._begin = self._last_line = clock()
        self._message = "starting"
        self._planned: list[Check] = []
        self._running: dict[Check, float] = {}
        self._done: set[Check] = set()
        self._open: Counter[str] = Counter()
        self._cached: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._failed = False

    def message(self, text: str) -> None:
        """Show a message of the work; on a terminal in the live line until checks
        run."""
        self._message = text
        if self._planned or not self._console.is_terminal:
            self._print(text)

    def planned(self, checks: Sequence[Check]) -> None:
        self._planned = list(checks)
        self._open.update(check.release for check in checks)

    def started(self, check: Check) -> None:
        self._running[check] = self._clock()

    def finished(self, check: Check, result: Result) -> None:
        self._running.pop(check, None)
        self._done.add(check)
        self._open[check.release] -= 1
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
                f"{check} ({in_words(now - since)})"
                for check, since in self._running.items()
            )
            self._print(f"still running: {running}; {self._times()}")

    def __rich__(self) -> Text:
        """The live line: done and total, times, and the running checks."""
        line = f"{self._times()}: {self._message}"
        if self._planned:
            running = ", ".join(map(str, list(self._running))) or "finishing"
            line = f"{self._count()} checks, {self._times()}: {running}"
        return Text(line, style="bold", no_wrap=True, overflow="ellipsis")

    def _print_result(self, check: Check, result: Result) -> None:
        if result.status != "blocked" and result.seconds:
            self._seconds.append(result.seconds)
        spent = f", {in_words(result.seconds)}" if result.seconds else ""
        line = Text(f"[{self._count()}] {check}: ")
        line.append(result.status, STYLE[result.status]).append(spent)
        self._print(line)
        if result.status == "failed" and not self._failed:
            self._failed = True
            self._print("\n".join(failure(result)))

    def _count(self) -> str:
        left = sum(self._open.values())
        return f"{len(self._planned) - left}/{len(self._planned)}"

    def _times(self) -> str:
        now = self._clock()
        elapsed = f"{in_words(now - self._begin)} elapsed"
        if not self._seconds:
            return elapsed
        # Each check that is left is expected to take as long as those that ended.
        expected = fmean(self._seconds)
        rest = [
            max(expected - (now - self._running.get(check, now)), 0.0)
            for check in self._planned
            if check not in self._done
        ]
        left = sum(rest) / self._jobs
        return f"{elapsed}, about {about(left)} left"

    def _print(self, line: str | Text) -> None:
        self._last_line = self._clock()
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def in_words(seconds: float) -> str:
    """`45 s`, `3 min 10 s` or `1 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def about(seconds: float) -> str:
    """As `in_words`, rounded as an estimate should be."""
    if seconds < 90:
        return f"{max(round(seconds / 10) * 10, 10)} s"
    if seconds < 3600:
        return f"{round(seconds / 60)} min"
    return in_words(seconds)
