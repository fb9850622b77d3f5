# SPDX-License-Identifier: Apache-2.0
"""Whole runs over two small releases: caching, broken neighbours, interrupts."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from children import ended, killed, start_tool
from tiny_stack import BASE, PROVES, VALUE, TinyStack

from xpustack import checks
from xpustack.cache import Cache
from xpustack.errors import UsageError
from xpustack.process import Runner
from xpustack.project import Project
from xpustack.results import Report


def check(stack: TinyStack, *names: str, **options) -> Report:
    pinned = stack.releases
    chosen = [pinned[name] for name in names or pinned.names]
    return checks.run(stack.project, stack.cache, chosen, offline=True, **options)


def states(report: Report) -> list[str]:
    return [f"{r.release} {r.step} {r.kind} {r.status}" for r in report.results]


@pytest.fixture
def mine(tiny: TinyStack, tmp_path: Path) -> TinyStack:
    """A copy of `tiny` with what its cache holds."""
    other = TinyStack.__new__(TinyStack)
    shutil.copytree(tiny.root, tmp_path / "mine")
    other.root = tmp_path / "mine"
    other.project = Project(other.root / "project")
    other.cache = Cache(other.root / "cache")
    return other


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


def test_a_change_of_the_test_repeats_the_test_alone(mine):
    check(mine)
    path = mine.project.step_tests / "test_value.py"
    path.write_text(path.read_text() + "# another look\n")
    again = check(mine, "v1.0")
    assert [r.kind for r in again.results if not r.cached] == ["test"]


def test_a_changed_pin_of_the_kernels_repeats_the_test(mine):
    """The stand-in of this stack's emulation refuses another version."""
    check(mine, "v1.0")
    mine.write(
        "releases.toml",
        mine.project.releases_file.read_text().replace(
            'xpu_kernels = { version = "2.11.0"', 'xpu_kernels = { version = "2.11.1"'
        ),
    )
    again = check(mine, "v1.0")
    assert states(again)[-1] == "v1.0 raise-value test failed"


def test_a_stored_result_of_another_check_is_not_taken(mine):
    check(mine, "v1.0")
    for path in mine.cache.results.rglob("test-*.json"):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "step": "another-step"}))
    again = check(mine, "v1.0", only="test")
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


def test_a_broken_release_does_not_stop_the_others(mine):
    patch = mine.patch("raise-value", "v1.0")
    patch.write_text(patch.read_text().replace("-VALUE = 1", "-VALUE = 3"))
    report = check(mine)
    assert "v1.0 raise-value apply failed" in states(report)
    assert "v2.0 raise-value test passed" in states(report)
    patch.unlink()
    assert "v2.0 raise-value test passed" in states(check(mine))


def test_a_broken_build_fails_and_blocks_its_test(mine):
    script = BASE["setup.py"] + '\nraise SystemExit("broken")\n'
    mine.add("break-it", {"setup.py": script})
    report = check(mine, "v1.0")
    assert states(report)[-3:] == [
        "v1.0 break-it build failed",
        "v1.0 break-it lint passed",
        "v1.0 break-it test blocked",
    ]


def test_a_step_that_lints_worse_fails(mine):
    text = BASE[VALUE].replace("VALUE = 1", "VALUE = 2") + "import sys\n"
    mine.add("worse", {VALUE: text})
    report = check(mine, "v1.0", step="worse", only="lint")
    assert states(report) == ["v1.0 worse lint failed"]
    assert any("F401 `sys`" in line for line in report.results[0].detail)


def test_a_failure_is_looked_at_again_and_its_command_works(mine):
    path = mine.project.step_tests / "test_value.py"
    path.write_text(path.read_text().replace("== 2", "> 0"))
    report = check(mine, "v1.0", only="test")
    (result,) = report.results
    assert result.status == "failed"
    assert "passes before the step" in result.detail[0]
    assert result.command == "python -m xpustack check v1.0 raise-value --only test"
    assert not check(mine, "v1.0", only="test").results[0].cached
    done = mine.run(*result.command.split()[3:], "--offline")
    assert done.returncode == 1
    assert "passes before the step" in done.stdout
    assert done.stdout.endswith("\n0 passed, 1 failed\n")


def start_hanging(
    stack: TinyStack, tmp_path: Path, number: int
) -> tuple[subprocess.Popen[str], int, int]:
    """Start checks whose test hangs with a child in a session of its own: the tool's
    process, the test's number and its child's."""
    note = tmp_path / "numbers"
    (stack.project.step_tests / "test_value.py").write_text(
        "import os, pathlib, subprocess, time\n\n\ndef test_long():\n"
        "    words = ['sleep', '120']\n"
        "    child = subprocess.Popen(words, start_new_session=True)\n"
        "    numbers = f'{os.getpid()} {child.pid}.'\n"
        f"    pathlib.Path({str(note)!r}).write_text(numbers)\n"
        "    time.sleep(120)\n"
    )
    words = ["check", "v1.0", "--offline"]
    child = start_tool(words, stack.project.root, stack.environment, number)
    limit = time.monotonic() + 60
    while not (note.exists() and note.read_text().endswith(".")):
        assert time.monotonic() < limit and child.poll() is None
        time.sleep(0.05)
    test, grandchild = note.read_text().rstrip(".").split()
    return child, int(test), int(grandchild)


def test_kill_9_leaves_no_test_behind(mine, tmp_path):
    child, test, grandchild = start_hanging(mine, tmp_path, signal.SIGTERM)
    killed(child)
    limit = time.monotonic() + 10
    while not (ended(test) and ended(grandchild)):
        assert time.monotonic() < limit
        time.sleep(0.05)
    (mine.project.step_tests / "test_value.py").write_text(PROVES)
    assert check(mine, "v1.0").failed == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_kills_children_and_leaves_nothing(mine, tmp_path, number):
    child, test, grandchild = start_hanging(mine, tmp_path, number)
    before = set(mine.cache.results.rglob("*.json"))
    child.send_signal(number)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130, stderr
    assert "interrupted" in stderr
    assert ended(test) and ended(grandchild)
    assert list(mine.cache.root.rglob("*.part")) == []
    assert set(mine.cache.results.rglob("*.json")) == before
