# SPDX-License-Identifier: Apache-2.0
"""kill -9 at random moments, then a normal run: nothing is lost, nothing is left.

`XPUSTACK_KILL_SEED` repeats the moments of a run that failed.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from children import TOOL, killed, start_tool
from tiny_stack import TWO, VALUE, TinyStack

from xpustack.checks.results import DERIVED

MOMENTS = 10
"""How often each of the two commands is killed."""

SEED = int(
    os.environ.get("XPUSTACK_KILL_SEED") or random.SystemRandom().getrandbits(32)
)
PASSES_BEFORE = "def test_it():\n    assert True\n"


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run gives: its seconds, exit status and outcome."""

    stack: TinyStack
    words: tuple[str, ...]
    seconds: float
    status: int
    outcome: Any


def outcome(stack: TinyStack, words: tuple[str, ...]) -> tuple[int, Any]:
    """Run a command undisturbed; its exit status and what it found or made."""
    done = subprocess.run(
        [*TOOL, *words],
        cwd=stack.project.root,
        env=environment(stack),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    if words[0] == "check":
        results = json.loads(done.stdout)["data"]["results"]
        keys = ("release", "step", "kind", "status")
        # A run compares a derived tree with a real build only if it derives one.
        return done.returncode, [
            [result[key] for key in keys]
            for result in results
            if result["step"] != DERIVED
        ]
    folder = stack.project.root / "dist"
    return done.returncode, {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fresh(stack: TinyStack, root: Path) -> TinyStack:
    """The same stack with nothing in its cache but archives."""
    other = TinyStack.__new__(TinyStack)
    shutil.copytree(stack.project.root, root / "project")
    shutil.copytree(stack.cache.sdists, root / "cache" / "sdists")
    (root / "tmp").mkdir()
    other.root = root
    other.project = type(stack.project)(root / "project")
    other.cache = type(stack.cache)(root / "cache")
    return other


def environment(stack: TinyStack) -> dict[str, str]:
    return {**stack.environment, "TMPDIR": str(stack.root / "tmp")}


def processes(root: Path) -> list[str]:
    """The command lines of the processes that work below `root`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            known = (folder / "environ").read_bytes() + (
                folder / "cmdline"
            ).read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(root).encode() in known and state != "Z":
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            found.append(f"{folder.name} {command.decode()}")
    return found


def wait_for_the_end(root: Path) -> None:
    limit = time.monotonic() + 20
    while left := processes(root):
        assert time.monotonic() < limit, left
        time.sleep(0.05)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    """v1.0 with a step that is proven, and one whose test proves nothing."""
    stack = TinyStack(tmp_path_factory.mktemp("broken"))
    stack.write("tests/steps/test_nothing.py", PASSES_BEFORE)
    stack.add("raise-value", {VALUE: TWO})
    text = TWO.replace("OLD = 1", "OLD = 2")
    stack.add("unproven", {VALUE: text}, test="tests/steps/test_nothing.py")
    return stack


@pytest.fixture(scope="module", params=["check", "build"])
def reference(
    request: pytest.FixtureRequest,
    broken: TinyStack,
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    words = {
        "check": ("check", "v1.0", "--offline", "--json"),
        "build": ("build", "v1.0", "--offline"),
    }[request.param]
    stack = fresh(broken, tmp_path_factory.mktemp("reference"))
    begin = time.monotonic()
    status, found = outcome(stack, words)
    return Reference(stack, words, time.monotonic() - begin, status, found)


def test_the_reference_is_red_where_it_should_be(reference: Reference) -> None:
    if reference.words[0] == "build":
        assert reference.status == 0 and len(reference.outcome) == 6
        return
    assert reference.status == 1
    red = [row for row in reference.outcome if row[3] != "passed"]
    assert red == [["v1.0", "unproven", "test", "failed"]]


@pytest.mark.parametrize("number", range(MOMENTS))
def test_a_kill_loses_nothing(
    reference: Reference, broken: TinyStack, tmp_path: Path, number: int
) -> None:
    command = reference.words[0]
    moment = random.Random(f"{SEED} {command} {number}").random() * reference.seconds
    print(f"XPUSTACK_KILL_SEED={SEED}: {command} killed after {moment:.3f} s")
    stack = fresh(broken, tmp_path)
    before = stack.contents()
    variables = environment(stack)
    child = start_tool(reference.words, stack.project.root, variables, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(moment)
    killed(child)
    wait_for_the_end(stack.root)
    status, found = outcome(stack, reference.words)
    assert (status, found) == (reference.status, reference.outcome)
    wait_for_the_end(stack.root)
    after = stack.contents()
    assert {name: after[name] for name in before} == before
    made = {name.partition("/")[0] for name in after.keys() - before.keys()}
    assert made <= {"dist"}
    assert list(stack.root.rglob("*.part")) == []
    assert list((stack.root / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "command", ["mailinfo", "fast-import", "apply", "commit-tree", "checkout-index"]
)
def test_a_kill_inside_git_loses_nothing(
    broken: TinyStack, tmp_path: Path, command: str
) -> None:
    """The moments that are too short to be met by chance."""
    stack = fresh(broken, tmp_path / "stack")
    note, tools = tmp_path / "pid", tmp_path / "tools"
    tools.mkdir()
    real = shutil.which("git")
    (tools / "git").write_text(
        f"#!/bin/sh\nfor word; do\n"
        f'[ "$word" = {command} ] && echo $$ > {note} && exec sleep 60\n'
        f'done\nexec {real} "$@"\n'
    )
    (tools / "git").chmod(0o755)
    variables = environment(stack)
    words = ["apply", "v1.0", "--to", str(stack.root / "work"), "--offline"]
    slow = {**variables, "PATH": f"{tools}:{variables['PATH']}"}
    child = start_tool(words, stack.project.root, slow, signal.SIGINT)
    limit = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and child.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert child.poll() is None, child.communicate()
    child.kill()
    os.kill(int(note.read_text()), signal.SIGKILL)
    child.communicate()
    wait_for_the_end(stack.root)
    done = subprocess.run(
        [*TOOL, *words],
        cwd=stack.project.root,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert stack.trees()[-1].index == 2
    assert list(stack.root.rglob("*.part")) == []
    assert list((stack.root / "tmp").iterdir()) == []
