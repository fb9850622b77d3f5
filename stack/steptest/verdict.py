# SPDX-License-Identifier: Apache-2.0
"""The rules by which two runs of a step's test prove the step."""

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec


class Test(msgspec.Struct, frozen=True):
    """One test's outcome: passed, failed, error, skipped, xfailed or xpassed.
    `text` is the exception or the reason of the skip; `seconds` is wall time;
    `figure` is what it printed as its figure."""

    __test__: ClassVar[bool] = False

    id: str
    outcome: str
    unchanged: bool = False
    any_platform: bool = False
    may_skip: bool = False
    import_error: bool = False
    text: str = ""
    seconds: float = 0.0
    figure: str = ""

    @property
    def name(self) -> str:
        return self.id.partition("::")[2] or self.id

    @property
    def red(self) -> bool:
        return self.outcome in ("failed", "error")


class CollectionProblem(msgspec.Struct, frozen=True):
    """A module that pytest could not read (`failed`) or that skipped itself."""

    id: str
    outcome: str
    text: str


class ModuleRun(msgspec.Struct, frozen=True):
    """A test module on one tree. `crash` says why pytest's outcomes do not count,
    `output` is the end of what it printed, `reads` are the names of the files of
    `material.Support` that it read."""

    tests: tuple[Test, ...] = ()
    collection: tuple[CollectionProblem, ...] = ()
    crash: str = ""
    output: tuple[str, ...] = ()
    seconds: float = 0.0
    reads: tuple[str, ...] = ()


def judge(
    before: ModuleRun, after: ModuleRun, failure: str | None, *, imports: bool
) -> tuple[str, ...]:
    """The reasons why two runs do not prove a step; empty if they do.

    Args:
        before: the run on the tree before the step.
        after: the run on the tree after it.
        failure: regular expression that a failure before must match; None if
            the step only brings files that nothing calls yet.
        imports: an ImportError or collection error before counts as a failure.
    """
    lenient = imports or failure is None
    problems = [*_after(after)]
    problems += _before(before, after, lenient)
    if failure is not None and not before.crash:
        problems += _mismatch(before, failure, lenient)
    return tuple(problems)


def judge_alone(after: ModuleRun) -> tuple[str, ...]:
    """The reasons why one run alone does not pass; empty if it does."""
    return tuple(_after(after))


def judge_on_cpu(before: ModuleRun | None, after: ModuleRun) -> tuple[str, ...]:
    """The reasons why two runs on vLLM's CPU platform do not show what the step does
    there; empty if they do. Tests marked `any_platform` count: those marked `unchanged`
    pass on both trees, the others fail before.

    Args:
        before: the run on the tree before the step; None if the module cannot be
            collected there on XPU either.
        after: the run on the tree after it.
    """
    problems: list[str] = []
    for run, when in ((before, "on a CPU before"), (after, "on a CPU after")):
        if run is not None:
            problems += _unusable(run, when)
            problems += _elsewhere(run, when, red=run is before)
    return tuple(problems)


def _elsewhere(run: ModuleRun, when: str, *, red: bool) -> Iterator[str]:
    for test in run.tests:
        if test.any_platform:
            if red and not test.unchanged:
                if test.outcome == "passed":
                    yield f"{test.name} passes {when} the step: it proves nothing there"
            elif test.red:
                yield f"{test.name} fails {when} the step: {_first(test.text)}"
            yield from _skips(test, when)


def _after(run: ModuleRun) -> Iterator[str]:
    yield from _unusable(run, "after")
    if not run.tests and not run.crash and not run.collection:
        yield "the module holds no test"
    for test in run.tests:
        if test.red:
            yield f"{test.name} fails after the step: {_first(test.text)}"
        yield from _skips(test, "after")


def _before(run: ModuleRun, after: ModuleRun, lenient: bool) -> Iterator[str]:
    if run.crash or not lenient:
        yield from _unusable(run, "before")
    if run.crash or any(problem.outcome == "failed" for problem in run.collection):
        return
    earlier_tests = {test.id: test for test in run.tests}
    for test in after.tests:
        earlier = earlier_tests.get(test.id)
        if earlier is None:
            yield f"{test.name} does not exist on the tree before the step"
    for test in run.tests:
        if test.red and test.unchanged:
            yield (
                f"{test.name} is marked unchanged but fails before the step:"
                f" {_first(test.text)}"
            )
        if test.outcome == "passed" and not test.unchanged:
            yield (
                f"{test.name} passes before the step: it proves nothing"
                " (mark it unchanged if that is its meaning)"
            )
        yield from _skips(test, "before")


def _mismatch(run: ModuleRun, failure: str, lenient: bool) -> Iterator[str]:
    texts = [
        test.text
        for test in run.tests
        if test.red and not test.unchanged and (lenient or not test.import_error)
    ]
    if lenient:
        texts += [
            problem.text for problem in run.collection if problem.outcome == "failed"
        ]
    if any(re.search(failure, text) for text in texts):
        return
    if texts:
        yield f"no failure before the step matches Fails-before: {failure}"
        yield from (f"  it was: {_first(text)}" for text in dict.fromkeys(texts))
    elif any(test.import_error for test in run.tests):
        yield (
            "red before the step only by ImportError: at least one test must enter"
            " through something that the tree before already has"
        )
    elif not run.collection:
        yield f"nothing fails before the step; Fails-before: {failure}"


def _unusable(run: ModuleRun, when: str) -> Iterator[str]:
    if run.crash:
        yield f"pytest gave no result {when} the step: {run.crash}"
    for problem in run.collection:
        text = _last(problem.text)
        if problem.outcome == "skipped":
            yield f"the module skips itself {when} the step: {text}"
        elif when != "before":
            yield f"the module cannot be collected {when} the step: {text}"
        else:
            yield (
                "red before the step only because the module cannot be collected"
                f" there, which proves nothing: {text}"
            )


def _skips(test: Test, when: str) -> Iterator[str]:
    if test.outcome == "skipped" and not test.may_skip:
        yield f"{test.name} is skipped {when} the step: {_first(test.text)}"
    if test.outcome in ("xfailed", "xpassed"):
        yield f"{test.name} is marked xfail: a step's test passes or fails"


def _first(text: str) -> str:
    return text.strip().partition("\n")[0] or "(no message)"


def _last(text: str) -> str:
    """The line of a traceback that names the exception."""
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return (marked or list(lines) or ["(no message)"])[-1]
