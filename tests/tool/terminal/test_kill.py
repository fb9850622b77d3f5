# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any moment: what a killed run leaves is whole, and a normal run then ends
as if nothing had happened.

`XPUSTACK_KILL_SEED` repeats the random moments of a run that failed.
"""

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cache_audit import Holdings, audit
from forks import ForkedRun, Forks, forking
from tiny_stack import TWO, VALUE, TinyStack

from xpustack.checks.results import DERIVED
from xpustack.core.cache import recover_dir
from xpustack.release.ship import COMPANION_FILES

KILLS = 5
"""How often each command is killed at random, one time after another."""

SEED = int(
    os.environ.get("XPUSTACK_KILL_SEED") or random.SystemRandom().getrandbits(32)
)
PASSES_BEFORE = "def test_it():\n    assert True\n"

Hashes = dict[str, str]
"""The sha256 of files by their paths."""


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run of a command does.

    Attributes:
        stack: where the command starts; its cache holds archives alone.
        sources: the project's files, which the command does not change.
        old_wheel: the shipped files before the run; `wheel` those after it.
        run: the run itself, and `outcome` what it reported.
        cache: what the cache holds afterwards.
    """

    stack: TinyStack
    words: tuple[str, ...]
    sources: Hashes
    old_wheel: Hashes
    run: ForkedRun
    outcome: Any
    cache: Holdings
    wheel: Hashes


def fresh(stack: TinyStack, root: Path) -> TinyStack:
    """A copy of the stack whose cache holds archives alone."""
    shutil.copytree(stack.project.root, root / "project")
    shutil.copytree(stack.cache.sdists, root / "cache" / "sdists")
    (root / "tmp").mkdir()
    return TinyStack.at(root)


def sources(stack: TinyStack) -> Hashes:
    hashes = hashes_below(stack.project.root)
    return {path: sha256 for path, sha256 in hashes.items() if path[:5] != "dist/"}


def wheel(stack: TinyStack) -> Hashes:
    """What `xpustack build v1.0` wrote."""
    folder = stack.project.root / "dist" / "v1.0"
    recover_dir(folder)
    return hashes_below(folder)


def hashes_below(folder: Path) -> Hashes:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def outcome(run: ForkedRun) -> Any:
    """What `check --json` reported; None for another command."""
    assert "Traceback" not in run.stderr, run.stderr
    if not run.stdout.startswith("{"):
        return None
    keys = ("release", "step", "kind", "status")
    # A run compares a derived tree with a real build only if it derives one.
    return [
        [result[key] for key in keys]
        for result in json.loads(run.stdout)["data"]["results"]
        if result["step"] != DERIVED
    ]


def faults(stack: TinyStack, reference: Reference) -> list[str]:
    """What a killed run left that is not whole, or that the reference does not have."""
    wait_for_the_end(stack.root)
    cache = audit(stack.cache)
    wrong = list(cache.faults)
    for key, result in cache.results.items():
        if reference.cache.results.get(key) != result:
            wrong.append(f"result {key} is not the reference's")
    for key, digest in cache.builds.items():
        if reference.cache.builds.get(key) != digest:
            wrong.append(f"build {key} is not the reference's")
    if sources(stack) != reference.sources:
        wrong.append("the project's files are changed")
    if (shipped := wheel(stack)) not in (reference.old_wheel, reference.wheel):
        wrong.append(f"dist holds only {sorted(shipped)}, or other contents")
    return wrong


def require_the_same(stack: TinyStack, reference: Reference, run: ForkedRun) -> None:
    """Insist that a normal run ends like the reference and leaves nothing else."""
    assert outcome(run) == reference.outcome
    assert run.status == reference.run.status
    assert faults(stack, reference) == []
    cache = audit(stack.cache)
    assert cache.builds == reference.cache.builds
    missing = reference.cache.results.keys() - cache.results.keys()
    assert all(key.startswith("equal-") for key in missing), missing
    assert wheel(stack) == reference.wheel
    require_no_leftovers(stack)


def require_no_leftovers(stack: TinyStack) -> None:
    assert list(stack.root.rglob("*.part")) == []
    assert list((stack.root / "tmp").iterdir()) == []


def wait_for_the_end(root: Path) -> None:
    """Wait until no process works below `root`."""
    limit = time.monotonic() + 20
    while left := list(processes(root)):
        assert time.monotonic() < limit, left
        time.sleep(0.02)


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
            words = command.decode().replace("\0", " ")
            yield f"{folder.name} {words}"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forking() as forks:
        yield forks


@pytest.fixture(scope="module")
def unproven(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    """v1.0 with a step that is proven, and one whose test proves nothing."""
    stack = TinyStack(tmp_path_factory.mktemp("unproven"))
    stack.write("tests/steps/test_nothing.py", PASSES_BEFORE)
    stack.add("raise-value", {VALUE: TWO})
    text = TWO.replace("OLD = 1", "OLD = 2")
    stack.add("unproven", {VALUE: text}, test="tests/steps/test_nothing.py")
    return stack


@pytest.fixture(scope="module", params=["check", "build"])
def reference(
    request: pytest.FixtureRequest,
    forks: Forks,
    unproven: TinyStack,
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    stack = fresh(unproven, tmp_path_factory.mktemp("reference"))
    words: tuple[str, ...] = ("check", "v1.0", "--offline", "--json", "-j1")
    if request.param == "build":
        # The wheel of an earlier revision is replaced.
        words = ("build", "v1.0", "--offline")
        assert forks.run(stack, words).status == 0
        pins = stack.project.releases_file
        pins.write_text(pins.read_text().replace("revision = 1", "revision = 2"))
    start = fresh(stack, tmp_path_factory.mktemp("start"))
    run = forks.run(stack, words)
    cache = audit(stack.cache)
    assert cache.faults == []
    return Reference(
        start,
        words,
        sources(start),
        wheel(start),
        run,
        outcome(run),
        cache,
        wheel(stack),
    )


def test_the_reference_is_red_where_it_should_be(reference: Reference) -> None:
    if reference.words[0] == "build":
        assert reference.run.status == 0
        assert (
            len(reference.wheel) == len(reference.old_wheel) == 1 + len(COMPANION_FILES)
        )
        assert reference.wheel.keys() != reference.old_wheel.keys()
        return
    assert reference.run.status == 1
    red = [row for row in reference.outcome if row[3] != "passed"]
    assert red == [["v1.0", "unproven", "test", "failed"]]
    assert (len(reference.cache.builds), len(reference.cache.results)) == (3, 4)


def test_a_kill_at_a_random_moment_loses_nothing(
    reference: Reference, forks: Forks, tmp_path: Path
) -> None:
    """Each run goes on where the one before was killed, with two jobs at a time."""
    command = reference.words[0]
    words = [word for word in reference.words if word != "-j1"]
    moments = random.Random(f"{SEED} {command}")
    stack = fresh(reference.stack, tmp_path)
    for _ in range(KILLS):
        moment = moments.uniform(0, 0.6) * reference.run.seconds
        print(f"XPUSTACK_KILL_SEED={SEED}: {command} killed after {moment:.3f} s")
        forks.run(stack, words, die_after=moment)
        assert faults(stack, reference) == []
    require_the_same(stack, reference, forks.run(stack, words))


def test_a_kill_at_any_change_of_a_file_loses_nothing(
    reference: Reference, forks: Forks, tmp_path: Path
) -> None:
    """Each run goes on where the one before was killed, and dies at a later change."""
    changes = reference.run.changes
    if reference.words[0] == "build":
        changes = tuple(name for name in changes if "/dist" in name)
    stack, wheels = fresh(reference.stack, tmp_path), tmp_path / "wheels"
    for name in changes:
        run = forks.run(stack, reference.words, die_at=name, wheels=wheels)
        assert run.killed, f"no run met: {name}"
        assert faults(stack, reference) == [], f"killed at: {name}"
    require_the_same(stack, reference, forks.run(stack, reference.words))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "command", ["mailinfo", "fast-import", "apply", "commit-tree", "checkout-index"]
)
def test_a_kill_around_a_git_command_loses_nothing(
    forks: Forks, unproven: TinyStack, tmp_path: Path, command: str, moment: str
) -> None:
    """The git command kills the tool before or after its own work."""
    stack = fresh(unproven, tmp_path / "stack")
    real, programs = shutil.which("git"), tmp_path / "programs"
    programs.mkdir()
    work = f'{real} "$@"; ' if moment == "after" else ""
    (programs / "git").write_text(
        f'#!/bin/sh\nfor word; do\n[ "$word" = {command} ] &&'
        f' {{ {work}kill -KILL $PPID; exit 1; }}\ndone\nexec {real} "$@"\n'
    )
    (programs / "git").chmod(0o755)
    words = ["apply", "v1.0", "--to", str(stack.root / "work"), "--offline"]
    assert forks.run(stack, words, programs=programs).killed
    wait_for_the_end(stack.root)
    assert audit(stack.cache).faults == []
    run = forks.run(stack, words)
    assert run.status == 0, run.stderr
    assert stack.trees()[-1].index == 2
    require_no_leftovers(stack)
