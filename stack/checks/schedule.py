# SPDX-License-Identifier: Apache-2.0
"""Runs tasks in parallel, each after those it needs; a failure stops no other task."""

import concurrent.futures
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from stack.core.errors import EnvironmentProblem, StackError
from stack.core.process import Runner, Stopped
from stack.series.result import Kind, Result

_TICK = 1.0
_SHOWN = 20


@dataclass(eq=False)
class Task:
    """One check to run: it starts when `after` have ended, and is blocked if one of
    `needs` did not pass. One that has its `result` does not run.

    Attributes:
        shown: whether the report has it even if it passes. One that is not shown runs
            only because others need it.
    """

    release: str
    step: str
    kind: Kind
    work: Callable[[], Result] | None = None
    needs: tuple["Task", ...] = ()
    after: tuple["Task", ...] = ()
    shown: bool = True
    result: Result | None = None

    @classmethod
    def ended(cls, result: Result) -> "Task":
        """The task of a result that is known."""
        return cls(result.release, result.step, result.kind, result=result)

    def __str__(self) -> str:
        return f"{self.release} {self.step} {self.kind}"

    def blocker(self) -> "Task | None":
        for task in self.needs:
            if task.result is not None and task.result.status != "passed":
                return task
        return None


class Observer:
    """Receives the events of a run, all in the thread that started the run, and ignores
    them. Methods that take their place must not block."""

    def planned(self, tasks: Sequence[Task]) -> None:
        """All tasks of the run are known; called once, before the first starts."""

    def started(self, task: Task) -> None:
        """A task starts. Blocked ones never start."""

    def finished(self, task: Task, result: Result) -> None:
        """A task has its result."""

    def waiting(self) -> None:
        """Tasks are running; called about once a second."""


def execute(
    tasks: Sequence[Task], runner: Runner, jobs: int, observer: Observer
) -> EnvironmentProblem | None:
    """Give each task its result, at most `jobs` of them at the same time.

    Returns:
        The problem of the machine that ended the run early: no task started after it,
        running tasks were killed, and those have no result. None if every task has one.

    Raises:
        CycleError: tasks wait for each other.
        KeyboardInterrupt: passed on after everything started was killed.
    """
    place = {task: number for number, task in enumerate(tasks)}
    graph = TopologicalSorter({task: (*task.needs, *task.after) for task in tasks})
    graph.prepare()
    ready: list[Task] = []
    running: dict[concurrent.futures.Future[Result], Task] = {}
    problem: EnvironmentProblem | None = None
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=jobs)

    def finish(task: Task, result: Result) -> None:
        task.result = result
        graph.done(task)
        observer.finished(task, result)

    def start_ready() -> None:
        ready.extend(graph.get_ready())
        ready.sort(key=place.__getitem__)
        for task in list(ready):
            blocker = task.blocker()
            if blocker is None and task.result is None and len(running) >= jobs:
                continue
            ready.remove(task)
            if task.result is not None:
                finish(task, task.result)
            elif blocker is not None:
                why = f"{blocker.step} {blocker.kind} did not pass"
                finish(
                    task,
                    Result(task.release, task.step, task.kind, "blocked", summary=why),
                )
            else:
                observer.started(task)
                running[pool.submit(_safely, task)] = task

    try:
        with runner.stop_on_error():
            while running or (graph.is_active() and problem is None):
                if problem is None:
                    start_ready()
                if not running:
                    continue
                ended, _ = concurrent.futures.wait(
                    running,
                    timeout=_TICK,
                    return_when=concurrent.futures.FIRST_COMPLETED,
                )
                for future in ended:
                    task = running.pop(future)
                    try:
                        finish(task, future.result())
                    except EnvironmentProblem as error:
                        problem = problem or error
                        runner.stop()
                    except Stopped:
                        if problem is None:
                            raise
                observer.waiting()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return problem


def _safely(task: Task) -> Result:
    """The task's result; whatever it raises is its failure, not the run's.

    Raises:
        EnvironmentProblem: the machine's failure is not the task's.
        Stopped: the run was stopped.
    """
    try:
        assert task.work is not None, "one without work has its result"
        return task.work()
    except (EnvironmentProblem, Stopped):
        raise
    except StackError as error:
        summary, detail = error.message, tuple(str(error).splitlines()[1:])
    except Exception as error:
        summary = f"{type(error).__name__}: {error}"
        detail = tuple(traceback.format_exc().splitlines()[-_SHOWN:])
    return Result(
        task.release, task.step, task.kind, "failed", summary=summary, detail=detail
    )
