# SPDX-License-Identifier: Apache-2.0
"""kill -9 at random moments: what a killed run leaves is whole, and a normal run then
ends as if nothing had happened.

`XPUSTACK_KILL_SEED` repeats the moments of a run that failed.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cache_audit import audit
from children import TOOL
from fake_stack import git
from tiny_stack import HEADER, TWO, VALUE, TinyStack

from stack.series.result import COPIED

KILLS = 5
"""How often each command is killed, one time after another."""
SEED = int(
    os.environ.get("XPUSTACK_KILL_SEED") or random.SystemRandom().getrandbits(32)
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "apply": ("apply", "v1.0", "--to", "applied", "--offline"),
    "save": ("save", "work"),
    "check": ("check", "v1.0", "--offline", "--json", "-j2"),
    "build": ("build", "v1.0", "--offline"),
}


@dataclass(frozen=True)
class End:
    """How a run ended: its status, what it reported, and the project's files."""

    status: int
    results: Any
    files: dict[str, str]


def files(stack: TinyStack) -> dict[str, str]:
    """The sha256 of the project's files. Of a repository only the files and the last
    commit count: its index has times."""
    root = stack.project.root
    hashes = {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and ".git" not in path.parts and ".xpustack-" not in str(path)
    }
    for work in (path for path in root.glob("*/.git") if path.parent.name[0] != "."):
        hashes[str(work)[len(str(root)) :]] = git(work.parent, "rev-parse", "HEAD")
    return hashes


def processes(root: Path) -> Iterator[str]:
    """The command lines of the processes that work below `root`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            environment = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(root).encode() in command + environment and state != "Z":
            yield f"{folder.name} {command.decode()}"


def require_no_process(root: Path) -> None:
    limit = time.monotonic() + 20
    while left := list(processes(root)):
        assert time.monotonic() < limit, left
        time.sleep(0.02)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    """v1.0 with a proven step, the wheel of an earlier revision, a folder of `apply`
    with one more step, and a cache that holds archives alone."""
    stack = TinyStack(tmp_path_factory.mktemp("start"))
    stack.add("raise-value", {VALUE: TWO})
    assert stack.run(*COMMANDS["build"]).returncode == 0
    pins = stack.project.releases_file
    pins.write_text(pins.read_text().replace("revision = 1", "revision = 2"))
    assert stack.run("apply", "v1.0", "--to", "work", "--offline").returncode == 0
    work = stack.project.root / "work"
    (work / VALUE).write_text(TWO + "MORE = 1\n")
    (work / "vllm/new.py").write_text(HEADER)
    git(work, "add", "--all")
    message = git(work, "show", "--no-patch", "--format=%B", "HEAD").strip()
    git(work, "commit", "-qF-", text=message.replace("raise-value", "more"))
    return copy(stack, tmp_path_factory.mktemp("clean"))


def copy(stack: TinyStack, root: Path) -> TinyStack:
    shutil.copytree(stack.project.root, root / "project", symlinks=True)
    shutil.copytree(stack.cache.sdists, root / "cache" / "sdists")
    (root / "tmp").mkdir()
    return TinyStack.at(root)


def run(stack: TinyStack, words: tuple[str, ...], moment: float | None = None) -> End:
    """Run the tool to its end, or kill it after `moment` seconds."""
    environment = {**stack.environment, "TMPDIR": str(stack.root / "tmp")}
    output = stack.root / "output"
    with output.open("w") as stdout:
        child = subprocess.Popen(
            [*TOOL, *words],
            cwd=stack.project.root,
            env=environment,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = child.communicate(timeout=moment)
        except subprocess.TimeoutExpired:
            child.kill()
            _, errors = child.communicate()
    require_no_process(stack.root)
    assert "Traceback" not in errors, errors
    results = None
    if child.returncode == 0 and "--json" in words:
        rows = json.loads(output.read_text())["data"]["results"]
        keys = ("release", "step", "kind", "status")
        # A run compares a copied tree with a real build only if it copies one.
        results = [[row[key] for key in keys] for row in rows if row["step"] != COPIED]
    output.unlink()
    return End(child.returncode, results, files(stack))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_kill_at_a_random_moment_loses_nothing(
    start: TinyStack, tmp_path: Path, command: str
) -> None:
    """Each run goes on where the one before was killed."""
    words, before = COMMANDS[command], files(start)
    reference = copy(start, tmp_path / "reference")
    begin = time.monotonic()
    expected = run(reference, words)
    seconds = time.monotonic() - begin
    assert expected.status == 0
    assert (expected.files != before) == (command != "check")
    held = audit(reference.cache)
    stack = copy(start, tmp_path / "stack")
    moments = random.Random(f"{SEED} {command}")
    for _ in range(KILLS):
        moment = moments.uniform(0.1, 1) * seconds
        print(f"XPUSTACK_KILL_SEED={SEED}: {command} killed after {moment:.3f} s")
        left = run(stack, words, moment)
        for name, sha256 in left.files.items():
            assert sha256 in (before.get(name), expected.files.get(name)), name
        whole = (before.keys(), expected.files.keys())
        assert any(names <= left.files.keys() for names in whole)
        now = audit(stack.cache)
        assert now.faults == []
        assert now.builds.items() <= held.builds.items()
        for key in now.results.keys() & held.results.keys():
            assert now.results[key] == held.results[key]
    assert run(stack, words) == expected
    assert audit(stack.cache).builds == held.builds
    assert list(stack.root.rglob(".xpustack-*.part")) == []
    assert list((stack.root / "tmp").iterdir()) == []
