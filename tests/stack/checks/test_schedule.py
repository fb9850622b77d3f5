# SPDX-License-Identifier: Apache-2.0
"""The order in which tasks run, and what a failure takes along."""

import threading
import time
from collections.abc import Callable
from graphlib import CycleError

import pytest

from stack.checks.schedule import Observer, Task, execute
from stack.core.process import Runner
from stack.series.result import Result


class Log(Observer):
    """Notes what starts and ends."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def started(self, check: Task) -> None:
        self.events.append(f"{check.step} starts")

    def finished(self, check: Task, result: Result) -> None:
        self.events.append(f"{check.step} {result.status}")


def task(
    step: str,
    *needs: Task,
    after: tuple[Task, ...] = (),
    fails: bool = False,
    work: Callable[[], object] = lambda: None,
) -> Task:
    def run() -> Result:
        work()
        if fails:
            raise ValueError("no")
        return Result("v1.0", step, "test", "passed")

    return Task("v1.0", step, "test", run, needs, after)


def run(*tasks: Task, jobs: int = 1) -> list[str]:
    log = Log()
    assert execute(tasks, Runner(), jobs, log) is None
    return log.events


def test_what_could_start_starts_in_the_order_given() -> None:
    first, free = task("first"), task("free")
    events = run(task("last", first), free, first, task("late"))
    assert [event for event in events if event.endswith("starts")] == [
        *("free starts", "first starts", "last starts", "late starts")
    ]


def test_a_failure_blocks_what_needs_it_and_nothing_else() -> None:
    broken = task("broken", fails=True)
    child = task("child", broken)
    tasks = (
        broken,
        child,
        task("grandchild", child),
        task("follower", after=(broken,)),
    )
    assert run(*tasks) == [
        *("broken starts", "broken failed", "child blocked"),
        *("follower starts", "follower passed", "grandchild blocked"),
    ]
    assert tasks[2].result is not None
    assert tasks[2].result.summary == "child test did not pass"


def test_what_is_blocked_waits_for_all_that_comes_before_it() -> None:
    broken, slow = (
        task("broken", fails=True),
        task("slow", work=lambda: time.sleep(0.3)),
    )
    events = run(broken, slow, task("child", broken, slow), jobs=2)
    assert events[-2:] == ["slow passed", "child blocked"]


def test_no_more_than_the_jobs_run_at_once() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def work() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1

    run(*(task(str(number), work=work) for number in range(7)), jobs=3)
    assert most == [3]


def test_tasks_that_wait_for_each_other_are_a_fault_at_once() -> None:
    one = task("one")
    two = task("two", one)
    one.after = (two,)
    with pytest.raises(CycleError):
        run(one, two)
