# SPDX-License-Identifier: Apache-2.0
"""A report, as people and programs read it."""

import io

from rich.console import Console

from stack.core.errors import EnvironmentProblem
from stack.series.result import Report, Result
from stack.terminal.report import show

REPORT = Report(
    (
        Result("v1.0", "a", "build", "passed", 3.25, summary="1.0+xpu.dsv4.1"),
        Result("v1.0", "a", "lint", "passed", 9.0, cached=True),
        Result(
            "v1.0",
            "a",
            "test",
            "failed",
            1.0,
            summary="2 tests",
            detail=("why [bold]it[/bold] fails",),
            notes=("25 s after the step",),
        ),
        Result("v1.0", "b", "apply", "failed", summary="wrong order"),
        Result("v1.0", "c", "apply", "blocked", summary="b does not apply"),
        Result("v2.0", "a", "test", "failed", tip=True),
    ),
    12.0,
)


def shown(report: Report, verbose: bool = False) -> str:
    stream = io.StringIO()
    show(report, Console(file=stream, width=100), verbose)
    return stream.getvalue()


def test_the_last_line_counts():
    assert shown(REPORT).endswith("\n2 passed, 4 failed\n")
    assert shown(Report((), 0.0)).endswith("\n0 passed, 0 failed\n")


def test_the_trees_that_mypy_read_are_named():
    assert "types checked by mypy: none\n" in shown(REPORT)
    assert "mypy" not in shown(Report((), 0.0))
    steps = [Result("v2.0", name, "lint", "passed", typed=True) for name in "abc"]
    tips = [
        Result(name, "tip", "lint", "passed", typed=True) for name in ("v1.0", "v2.0")
    ]
    other = Result("v1.0", "a", "lint", "passed")
    text = shown(Report((other, tips[0], *steps, tips[1]), 1.0))
    assert "types checked by mypy: v1.0 tip; v2.0 3 steps, tip\n" in text
    assert "mypy: v2.0 a\n" in shown(Report((other, steps[0]), 1.0))


def test_a_failure_shows_its_lines_and_its_command():
    text = shown(REPORT)
    assert "FAILED v1.0 a test: 2 tests\n  why [bold]it[/bold] fails\n" in text
    assert "by hand: xpustack check v1.0 a --only test\n" in text
    assert "by hand: xpustack check v2.0 a --tip --only test\n" in text
    assert "by hand: xpustack apply v1.0 --to DIR" in text
    assert "BLOCKED v1.0 c apply: b does not apply" in text
    assert "note: v1.0 a: 25 s after the step" in text


def test_the_table_marks_what_is_cached_and_sums_work_alone():
    row = next(line for line in shown(REPORT).splitlines() if "│ v1.0" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["v1.0", "a", "passed", "passed *", "failed", "4.2 s"]


def test_json_has_the_same_counts_and_commands():
    data = REPORT.to_json()
    assert (data["passed"], data["failed"], data["seconds"]) == (2, 4, 12.0)
    assert data["results"][2]["command"].endswith("check v1.0 a --only test")


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_what_is_green_from_the_cache_is_one_row():
    def step(release: str, slug: str, cached: bool) -> list[Result]:
        return [
            Result(release, slug, "lint", "passed", 2.0, cached=cached),
            Result(release, slug, "test", "passed", 3.0, cached=cached),
        ]

    green = [result for slug in "abc" for result in step("v1.0", slug, True)]
    mixed = [result for slug in "abcd" for result in step("v2.0", slug, slug != "b")]
    report = Report((*green, *mixed), 5.0)
    assert rows(shown(report)) == [
        ["v1.0", "all 3", "-", "3 passed *", "3 passed *", "-"],
        ["v2.0", "b", "-", "passed", "passed", "5.0 s"],
        ["", "other 3", "-", "3 passed *", "3 passed *", "-"],
    ]
    assert len(rows(shown(report, verbose=True))) == 7


def test_a_run_that_ended_early_says_what_was_not_run():
    text = shown(Report(REPORT.results, 12.0, EnvironmentProblem("full"), 3))
    assert "stopped early: 3 not run\n" in text
    assert text.endswith("\n2 passed, 4 failed\n")


def test_the_command_of_a_tip_says_so():
    for kind in ("build", "lint"):
        result = Result("v1.0", "tip", kind, "failed")
        assert result.command == f"xpustack check v1.0 --tip --only {kind}"
