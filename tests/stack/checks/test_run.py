# SPDX-License-Identifier: Apache-2.0
"""Whole runs over two small releases: stored results, broken releases, interrupts."""

import errno
import json
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from calls import calling
from children import ends, killed, start_tool
from tiny_stack import BASE, HEADER, PROVES, TWO, VALUE, TinyStack

from stack.checks import run as checks
from stack.checks.schedule import Observer, Task, execute
from stack.core import cache as cache_module
from stack.core.cache import Cache
from stack.core.errors import EnvironmentProblem, UsageError
from stack.core.process import Runner
from stack.forks.server import Server
from stack.lint.linter import Linter
from stack.series.result import Report, Result
from stack.series.tree import Tree


def check(stack: TinyStack, *names: str, **options) -> Report:
    pinned = stack.releases
    chosen = [pinned[name] for name in names or pinned.names]
    return checks.run(stack.project, stack.cache, chosen, **options)


def states(report: Report) -> list[str]:
    return [f"{r.release} {r.step} {r.kind} {r.status}" for r in report.results]


@pytest.fixture
def stack(tiny: TinyStack, tmp_path: Path) -> TinyStack:
    """A copy of `tiny` and of its cache."""
    return tiny.copy(tmp_path / "stack")


def test_every_step_of_every_release_then_nothing_to_do(tiny, monkeypatch):
    first = check(tiny)
    assert (first.passed, first.failed) == (8, 0), first
    assert states(first)[:4] == [
        "v1.0 base build passed",
        "v1.0 raise-value build passed",
        "v1.0 raise-value lint passed",
        "v1.0 raise-value test passed",
    ]
    monkeypatch.setattr(Runner, "run", None)
    second = check(tiny)
    assert (second.passed, second.failed) == (8, 0)
    assert all(result.cached for result in second.results)


def test_real_builds_wait_for_the_first_ones(tiny: TinyStack) -> None:
    """Their byte code is there then, and need not be made twice at the same time."""

    class Plan(Observer):
        def planned(self, tasks: Sequence[Task]) -> None:
            self.builds = [task for task in tasks if task.kind == "build"]

    plan = Plan()
    check(tiny, observer=plan)
    newest, newest_tip, base, tip = plan.builds
    assert (newest.after, newest_tip.after) == ((), (newest,))
    assert (base.after, tip.needs, tip.after) == ((newest,), (), (base,))


def test_only_a_real_build_starts_the_server(stack, monkeypatch):
    """A copy needs none, and it imports for seconds what a test may never need."""
    started: list[Server] = []
    monkeypatch.setattr(Server, "start", lambda server: started.append(server))
    stack.add("more", {VALUE: TWO + "MORE = 1\n"})
    assert check(stack, "v1.0", only="build").failed == 0
    assert started
    started.clear()
    (copy,) = stack.cache.builds.glob("*/site/vllm-1.0+*.step1.dist-info")
    shutil.rmtree(copy.parents[1])
    assert check(stack, "v1.0", step="raise-value", only="build").failed == 0
    assert copy.is_dir()
    assert not started


def test_types_are_checked_step_by_step_on_the_newest_release_and_on_all_tips(
    stack: TinyStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in ("v1.0", "v2.0"):
        stack.add("more", {VALUE: TWO + "MORE = 1\n"}, release)
    real, typed, by_daemon = Linter.lint, [], []

    def lint(
        linter: Linter,
        name: str,
        before: Tree,
        after: Tree,
        *,
        types: bool,
        daemon: bool,
    ) -> Result:
        what = f"{after.release.name} {after.label} over {before.label}"
        if types:
            typed.append(what)
        if daemon:
            by_daemon.append(what)
        return real(linter, name, before, after, types=types, daemon=daemon)

    monkeypatch.setattr(Linter, "lint", lint)
    shutil.rmtree(stack.cache.results, ignore_errors=True)
    assert check(stack, only="lint", jobs=1).failed == 0
    steps = ["v2.0 raise-value over base", "v2.0 more over raise-value"]
    assert sorted(typed) == sorted(
        ["v1.0 more over base", *steps, "v2.0 more over base"]
    )
    assert by_daemon == steps, "the daemon checks what follows each other"
    by_daemon.clear()
    typed.clear()
    assert check(stack, only="lint", tips=["v1.0"]).failed == 0
    assert typed == [], "quick uses what the whole run stored"
    shutil.rmtree(stack.cache.results)
    check(stack, only="lint", tips=["v1.0"], quick=True)
    assert sorted(typed) == ["v1.0 more over base", "v2.0 more over base"]
    typed.clear()
    check(stack, step="more", only="lint", tips=["v1.0"], quick=True)
    assert typed == ["v2.0 more over raise-value"], "no tip is linted beside a step"
    shutil.rmtree(stack.cache.results)
    typed.clear()
    check(stack, "v1.0", step="more", only="lint")
    assert typed == [] and by_daemon == []


def test_a_quick_run_tests_a_patch_on_the_newest_release_that_has_it(stack):
    stack.add("old", {VALUE: TWO + "OLD = 1\n"}, "v1.0")
    report = check(stack, only="test", tips=["v1.0"], quick=True)
    shared = "v2.0 raise-value test passed"
    assert states(report) == ["v1.0 old test passed", shared]
    alone = check(stack, "v1.0", only="test", tips=["v1.0"], quick=True)
    assert len(alone.results) == 2, "nothing else tests what it shares"
    whole = check(stack, only="test", tips=["v1.0"])
    assert len(whole.results) == 3, "otherwise each release tests all of its own"


def test_a_change_of_the_test_repeats_the_test_alone(stack):
    check(stack)
    path = stack.project.root / "tests/steps" / "test_value.py"
    path.write_text(path.read_text() + "# another look\n")
    again = check(stack, "v1.0")
    assert [r.kind for r in again.results if not r.cached] == ["test"]


def test_a_damaged_tree_is_repaired_before_a_test_runs_on_it(stack):
    """A stored pass needs no tree, so an edited one is noticed when a test needs it."""

    def edited() -> list[Path]:
        trees = stack.cache.builds.glob("*/site/vllm/value.py")
        return [path for path in trees if "edited" in path.read_text()]

    check(stack)
    for path in list(stack.cache.builds.glob("*/site/vllm/value.py")):
        path.unlink()
        path.write_text("VALUE = 'edited'\n")
    assert all(result.cached for result in check(stack, "v1.0").results)
    assert len(edited()) == 4
    path = stack.project.root / "tests/steps" / "test_value.py"
    path.write_text(path.read_text() + "# another look\n")
    again = check(stack, "v1.0")
    assert "v1.0 raise-value test passed" in states(again)
    assert [r.kind for r in again.results if not r.cached] == ["test"]
    assert len(edited()) == 2


def test_a_changed_pin_of_the_kernels_repeats_the_test(stack):
    """The stand-in of this stack's emulation refuses another version."""
    check(stack, "v1.0")
    stack.write(
        "releases.toml",
        stack.project.releases_file.read_text().replace(
            'xpu_kernels = { version = "2.11.0"', 'xpu_kernels = { version = "2.11.1"'
        ),
    )
    again = check(stack, "v1.0")
    assert "v1.0 raise-value test failed" in states(again)


def test_a_stored_result_of_another_check_is_not_taken(stack):
    check(stack, "v1.0")
    for path in stack.cache.results.rglob("test-*.json"):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "step": "another-step"}))
    again = check(stack, "v1.0", only="test")
    assert [(r.status, r.cached) for r in again.results] == [("passed", False)]


def test_narrowed_to_a_step_and_a_kind(tiny):
    report = check(tiny, "v1.0", step="raise-value", only="test")
    assert states(report) == ["v1.0 raise-value test passed"]
    with pytest.raises(UsageError, match="did you mean raise-value"):
        check(tiny, "v1.0", step="raise-valu")


def test_the_tip_is_built_once_and_every_test_runs_on_it(tiny):
    report = check(tiny, "v1.0", tips=["v1.0"])
    assert states(report) == [
        "v1.0 tip build passed",
        "v1.0 tip lint passed",
        "v1.0 raise-value test passed",
    ]


def test_a_broken_release_does_not_stop_the_others(stack):
    stack.split("raise-value", "v2.0")
    patch = stack.patch("raise-value", "v1.0")
    patch.write_text(patch.read_text().replace("-VALUE = 1", "-VALUE = 3"))
    report = check(stack)
    assert "v1.0 raise-value apply failed" in states(report)
    assert "v2.0 raise-value test passed" in states(report)
    patch.unlink()
    assert "v2.0 raise-value test passed" in states(check(stack))


def test_a_broken_build_fails_and_blocks_its_test(stack):
    script = BASE["setup.py"] + '\nraise SystemExit("broken")\n'
    stack.add("break-it", {"setup.py": script})
    report = check(stack, "v1.0")
    assert states(report)[-4:] == [
        "v1.0 break-it build failed",
        "v1.0 break-it lint passed",
        "v1.0 break-it test blocked",
        "v1.0 tip lint passed",
    ]


def test_a_step_that_lints_worse_fails(stack):
    text = BASE[VALUE].replace("VALUE = 1", "VALUE = 2") + "import sys\n"
    stack.add("worse", {VALUE: text})
    report = check(stack, "v1.0", step="worse", only="lint")
    assert states(report) == ["v1.0 worse lint failed"]
    assert any("F401 `sys`" in line for line in report.results[0].detail)


def test_a_hook_that_breaks_on_a_step_is_that_step_s_failure(stack):
    hook = "tools/pre_commit/check_spdx_header.py"
    edits = {hook: "raise ValueError\n", VALUE: BASE[VALUE] + "NEW = 1\n"}
    stack.add("breaks-it", edits)
    report = check(stack, "v1.0", only="lint")
    assert report.problem is None
    assert states(report)[-2:] == [
        "v1.0 breaks-it lint failed",
        "v1.0 tip lint failed",
    ]


def test_a_failure_is_looked_at_again_and_its_command_works(stack):
    path = stack.project.root / "tests/steps" / "test_value.py"
    path.write_text(path.read_text().replace("== 2", "> 0"))
    report = check(stack, "v1.0", only="test")
    (result,) = report.results
    assert result.status == "failed"
    assert "passes before the step" in result.detail[0]
    assert result.command == "xpustack check v1.0 raise-value --only test"
    assert not check(stack, "v1.0", only="test").results[0].cached
    done = stack.run(*result.command.split()[1:], "--offline")
    assert done.returncode == 1
    assert "passes before the step" in done.stdout
    assert done.stdout.endswith("\n0 passed, 1 failed\n")


def start_hanging(
    stack: TinyStack, tmp_path: Path, number: int, *, built: bool = False
) -> tuple[subprocess.Popen[str], int, int]:
    """Start checks whose test, or build, hangs and has started a child in another
    session.

    Returns:
        The tool's process, the process id of the test or build and that of its child.
    """
    note = tmp_path / "numbers"
    act = (
        "words = ['sleep', '120']\n"
        "child = subprocess.Popen(words, start_new_session=True)\n"
        "numbers = f'{os.getpid()} {child.pid}.'\n"
        f"pathlib.Path({str(note)!r}).write_text(numbers)\n"
        "time.sleep(120)\n"
    )
    imports = "import os, pathlib, subprocess, time\n"
    if built:
        stack.add("hang", {"setup.py": HEADER + imports + act})
    else:
        test = imports + "\n\ndef test_long():\n" + textwrap.indent(act, "    ")
        (stack.project.root / "tests/steps" / "test_value.py").write_text(test)
    words = ["check", "v1.0", "--offline"]
    child = start_tool(words, stack.project.root, stack.environment, number)
    limit = time.monotonic() + 60
    # The lint beside it has ended, too.
    while not (
        any(stack.cache.results.glob("li/lint-*.json"))
        and note.exists()
        and note.read_text().endswith(".")
    ):
        assert time.monotonic() < limit and child.poll() is None
        time.sleep(0.05)
    hanging, grandchild = note.read_text().rstrip(".").split()
    return child, int(hanging), int(grandchild)


def test_kill_9_leaves_no_test_behind(stack, tmp_path):
    child, test, grandchild = start_hanging(stack, tmp_path, signal.SIGTERM)
    killed(child)
    assert ends(test) and ends(grandchild)
    (stack.project.root / "tests/steps" / "test_value.py").write_text(PROVES)
    assert check(stack, "v1.0").failed == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_kills_children_and_leaves_nothing(stack, tmp_path, number):
    child, test, grandchild = start_hanging(stack, tmp_path, number)
    before = set(stack.cache.results.rglob("*.json"))
    child.send_signal(number)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130, stderr
    assert "interrupted" in stderr
    assert ends(test) and ends(grandchild)
    assert list(stack.cache.root.rglob("*.part")) == []
    assert set(stack.cache.results.rglob("*.json")) == before


def test_an_interrupt_ends_a_build_and_leaves_nothing(stack, tmp_path):
    child, build, grandchild = start_hanging(
        stack, tmp_path, signal.SIGTERM, built=True
    )
    child.send_signal(signal.SIGTERM)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130, stderr
    assert ends(build) and ends(grandchild)
    assert list(stack.cache.root.rglob("*.part")) == []
    assert not list((stack.cache.root / "scratch").iterdir())


def test_a_malformed_later_step_does_not_concern_an_earlier_one(stack):
    stack.add("later", {VALUE: TWO.replace("OLD = 1", "OLD = 2")})
    stack.patch("later").write_text("no mail\n")
    report = check(stack, "v1.0", step="raise-value")
    assert (report.passed, report.failed) == (4, 0), report
    assert "v1.0 later apply failed" in states(check(stack, "v1.0"))
    tip = check(stack, "v1.0", step="raise-value", tips=["v1.0"])
    assert states(tip) == ["v1.0 later apply failed"], "there is no tip to test on"


class EventLog(Observer):
    """An observer that keeps the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def planned(self, checks: Sequence[Task]) -> None:
        self.events.append(f"planned {len(checks)}")

    def started(self, check: Task) -> None:
        self.events.append(f"started {check}")

    def finished(self, check: Task, result: Result) -> None:
        self.events.append(f"finished {check} {result.status}")


def test_an_observer_is_told_what_is_planned_starts_and_ends(tiny):
    check(tiny, "v1.0")
    log = EventLog()
    check(tiny, "v1.0", observer=log, jobs=1)
    events = [
        "started v1.0 raise-value lint",
        "finished v1.0 raise-value lint passed",
        "started v1.0 base build",
        "finished v1.0 base build passed",
        "started v1.0 raise-value build",
        "finished v1.0 raise-value build passed",
        "started v1.0 raise-value test",
        "finished v1.0 raise-value test passed",
    ]
    assert log.events == ["planned 4", *events]


def test_what_does_not_apply_is_among_the_events(stack):
    patch = stack.patch("raise-value", "v1.0")
    patch.write_text(patch.read_text().replace("-VALUE = 1", "-VALUE = 3"))
    log = EventLog()
    check(stack, "v1.0", observer=log)
    assert "finished v1.0 raise-value apply failed" in log.events


def refuse_results(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the results of a cache read-only, also for root."""
    new_dir = cache_module._new_dir

    def refusing(parent: Path) -> AbstractContextManager[Path]:
        if parent.is_relative_to(cache.results):
            raise OSError(errno.EROFS, "Read-only file system")
        return new_dir(parent)

    monkeypatch.setattr(cache_module, "_new_dir", refusing)


def test_a_read_only_cache_is_no_failed_check(stack, monkeypatch):
    shutil.rmtree(stack.cache.results, ignore_errors=True)
    refuse_results(stack.cache, monkeypatch)
    log = EventLog()
    report = check(stack, "v1.0", jobs=1, observer=log)
    assert report.failed == 0, report
    assert (report.problem and report.problem.exit_code, report.not_run) == (5, 4)
    assert states(report) == []
    assert log.events[-1] == "started v1.0 raise-value lint"
    call = calling(stack, monkeypatch)
    done = call("check", "v1.0", "--offline", "-j1")
    assert done.exit_code == 5, done.output
    assert done.stdout.endswith("\n0 passed, 0 failed\n")
    assert "stopped early: 4 not run" in done.stdout
    assert "error: not allowed to write" in done.stderr
    answer = json.loads(call("check", "v1.0", "--offline", "--json").stdout)
    assert (answer["exit_code"], answer["data"]["failed"]) == (5, 0)
    assert [error["error"] for error in answer["errors"]] == ["EnvironmentProblem"]


def test_a_store_that_cannot_be_written_is_no_failed_check(stack, monkeypatch):
    shutil.rmtree(stack.cache.objects)

    def refuse(path: Path) -> AbstractContextManager[Path]:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache_module, "_new_dir", refuse)
    with pytest.raises(EnvironmentProblem, match="not allowed to write"):
        check(stack, "v1.0")


def test_the_machine_s_failure_ends_what_runs():
    runner = Runner()

    def long() -> Result:
        runner.run(["sleep", "60"], cwd=Path("/"), env={}, timeout=90)
        raise AssertionError

    def broken() -> Result:
        time.sleep(0.3)
        raise EnvironmentProblem("the disk is full")

    begin = time.monotonic()
    works = {"a": long, "b": broken, "c": long}
    tasks = [Task("v1.0", step, "test", work) for step, work in works.items()]
    problem = execute(tasks, runner, 2, Observer())
    assert (str(problem), time.monotonic() - begin < 30) == ("the disk is full", True)
    assert [task.result for task in tasks] == [None, None, None]


@pytest.mark.parametrize("kind", ["build", "lint", "test"])
def test_the_command_of_a_tip_s_check_names_the_tip(tiny, kind):
    report = check(tiny, "v1.0", tips=["v1.0"], only=kind)
    (result,) = report.results
    words = result.command.split()[1:]
    assert "--tip" in words
    again = json.loads(tiny.run(*words, "--offline", "--json").stdout)["data"]
    assert [row["step"] for row in again["results"]] == [result.step]


def test_an_interrupt_is_one_envelope_under_json(stack, monkeypatch):
    def interrupted(*arguments: object, **options: object) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run", interrupted)
    done = calling(stack, monkeypatch)("check", "--offline", "--json")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["exit_code"], answer["ok"]) == (130, 130, False)
    assert [error["error"] for error in answer["errors"]] == ["Interrupted"]
