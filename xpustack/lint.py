# SPDX-License-Identifier: Apache-2.0
"""The base's own linters on what a step touches: nothing worse than before it."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpustack import environment, hooks
from xpustack.cache import Cache
from xpustack.checkout import checkout, checkout_paths
from xpustack.errors import CheckFailed
from xpustack.hooks import Hooks, Script
from xpustack.process import Completed, Runner, clean_environment
from xpustack.progress import Progress, silent
from xpustack.store import Store
from xpustack.tree import Tree

TIMEOUT = 600.0
RECIPE = ("lint", "hooks", "checkout", "process", "environment")
_PLACE = re.compile(r"^\s*(?P<path>[^\s:]+):(?P<line>\d+)(?::\d+)*:\s*(?P<text>.*)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(r"\bline \d+")


@dataclass(frozen=True)
class Finding:
    """One complaint. `content` is the stripped source line, by which the same
    complaint is known again on another line number; 0 is no line."""

    tool: str
    path: str
    line: int
    text: str
    content: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (*self.kind, self.content)

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.tool, self.path, _NUMBER.sub("line", self.text)

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.tool}: {self.text}"


@dataclass(frozen=True)
class Lint:
    """New findings of a step, how many the base had in the same files, what was
    run, and notes on tools that could not run or differ in version."""

    new: tuple[Finding, ...]
    old: int
    tools: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


def key_of(before: Tree, after: Tree) -> str:
    return environment.digest(
        before=before.tree_id,
        after=after.tree_id,
        tool=environment.tool(*RECIPE),
        environment=environment.lock(),
    )


def touched(before: Tree, after: Tree) -> tuple[str, ...]:
    """The paths in which `after` differs from its ancestor `before`, sorted."""
    paths: set[str] = set()
    tree: Tree | None = after
    while tree is not None and tree.index > before.index:
        paths.update(tree.changed)
        tree = tree.parent
    return tuple(sorted(paths))


def lint(
    runner: Runner,
    cache: Cache,
    store: Store,
    before: Tree,
    after: Tree,
    *,
    progress: Progress | None = None,
) -> Lint:
    """Lint the files in which the trees differ, inside each tree, and compare.

    Raises:
        CheckFailed: a tool breaks on the trees' files.
        EnvironmentProblem: ruff is not of the base's version.
        SourceError: the base's lint configuration is not understood.
        Stopped: the runner was stopped.
    """
    paths = touched(before, after)
    memory = cache.root / "mypy" / after.release.name
    with (
        cache.lock(f"mypy-{after.release.name}", progress or silent),
        cache.scratch() as work,
    ):
        folder = work / "tree"
        checkout(store, before, folder)
        asked = hooks.read(folder, after.release.name)
        session = _Session(runner, asked, folder, work, memory)
        old = session.findings(paths)
        checkout_paths(store, after, folder, paths)
        new = session.findings(paths)
    return Lint(
        new=worse(old, new),
        old=len(old),
        tools=tuple(session.tools),
        notes=asked.notes,
        seconds=session.seconds,
    )


def worse(before: Sequence[Finding], after: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of `after` that `before` does not have.

    A complaint that moved with its line is the same one; a complaint of one kind
    in one file whose line was edited takes the place of one that vanished.
    """
    known = Counter(finding.key for finding in before)
    left = []
    for finding in after:
        if known[finding.key]:
            known[finding.key] -= 1
        else:
            left.append(finding)
    vanished: Counter[tuple[str, str, str]] = Counter()
    for key, count in known.items():
        vanished[key[:3]] += count
    fresh = []
    for finding in left:
        if vanished[finding.kind]:
            vanished[finding.kind] -= 1
        else:
            fresh.append(finding)
    return tuple(fresh)


class _Session:
    """Runs the tools in `folder` and adds up what ran and how long it took."""

    def __init__(
        self, runner: Runner, asked: Hooks, folder: Path, work: Path, memory: Path
    ) -> None:
        self._runner, self._asked, self._folder = runner, asked, folder
        self._env = clean_environment(
            RUFF_CACHE_DIR=str(work / "ruff"),
            MYPY_CACHE_DIR=str(memory),
            TMPDIR=str(work),
            PYTHONDONTWRITEBYTECODE="1",
            PYTHONUTF8="1",
        )
        self.tools: dict[str, None] = {}
        self.seconds = 0.0

    def findings(self, paths: Iterable[str]) -> list[Finding]:
        """All findings in those of `paths` that exist in the folder now."""
        present = self._asked.visible(p for p in paths if (self._folder / p).is_file())
        python = [p for p in present if p.endswith((".py", ".pyi"))]
        found: list[Finding] = []
        if self._asked.ruff and python:
            environment.require(
                "ruff", self._asked.ruff, f"the base's {hooks.CONFIGURATION} pins it"
            )
            found += self._ruff_check(python)
            found += self._ruff_format(python)
        if self._asked.typos and present and environment.version_of("typos"):
            found += self._typos(present)
        if self._asked.mypy is not None:
            found += self._script(self._asked.mypy, present)
        # Last, since check_spdx_header.py adds a missing header to the file.
        for script in self._asked.scripts:
            found += self._script(script, present)
        return found

    def _run(self, name: str, command: list[str]) -> Completed:
        done = self._runner.run(
            command, cwd=self._folder, env=self._env, timeout=TIMEOUT
        )
        self.tools[name] = None
        self.seconds += done.seconds
        return done

    def _ruff_check(self, paths: list[str]) -> Iterator[Finding]:
        ruff = [sys.executable, "-m", "ruff", "check"]
        done = self._run(
            "ruff check",
            [*ruff, "--force-exclude", "--output-format=json", "--", *paths],
        )
        for entry in _json(done, "ruff check", (0, 1)):
            path = Path(entry["filename"]).relative_to(self._folder).as_posix()
            text = f"{entry['code']} {entry['message']}"
            yield self._finding("ruff check", path, entry["location"]["row"], text)

    def _ruff_format(self, paths: list[str]) -> Iterator[Finding]:
        ruff = [sys.executable, "-m", "ruff", "format"]
        done = self._run(
            "ruff format", [*ruff, "--force-exclude", "--diff", "--", *paths]
        )
        if done.returncode not in (0, 1):
            # A file that does not parse; ruff check says where.
            return
        path = ""
        for line in done.stdout.splitlines():
            if line.startswith("--- "):
                path = line.removeprefix("--- ")
            elif line.startswith("-"):
                content = line[1:].strip()
                yield Finding("ruff format", path, 0, "would be reformatted", content)

    def _typos(self, paths: list[str]) -> Iterator[Finding]:
        program = shutil.which("typos", path=self._env["PATH"]) or "typos"
        done = self._run(
            "typos", [program, "--force-exclude", "--format=json", "--", *paths]
        )
        for line in done.stdout.splitlines():
            entry = json.loads(line)
            if entry.get("type") == "typo":
                better = ", ".join(entry["corrections"])
                path = entry["path"].removeprefix("./")
                text = f"{entry['typo']} should be {better}"
                yield self._finding("typos", path, entry.get("line_num", 0), text)

    def _script(self, script: Script, present: list[str]) -> Iterator[Finding]:
        paths = [path for path in present if script.wanted(path)]
        if not paths:
            return
        done = self._run(script.name, [sys.executable, *script.arguments, *paths])
        if done.returncode == 0:
            return
        lines = _COLOUR.sub("", done.output).splitlines()
        placed = list(self._placed(script.name, lines, paths))
        blocked = "errors prevented further checking" in done.output
        if "Traceback (most recent call last)" in done.stderr or (
            blocked and not placed
        ):
            raise CheckFailed(
                f"the base's hook {script.name} could not do its work",
                path=script.arguments[0],
                detail=done.last_lines(15),
                hint="tox -e apply-and-test",
            )
        yield from placed
        if not placed:
            for line in filter(None, (line.strip() for line in lines)):
                yield Finding(script.name, script.arguments[0], 0, line, "")

    def _placed(
        self, name: str, lines: Iterable[str], paths: Sequence[str]
    ) -> Iterator[Finding]:
        for line in lines:
            place = _PLACE.match(line)
            if place is None:
                if line.strip() in paths:
                    yield Finding(name, line.strip(), 0, "refused", "")
            elif place["path"] in paths and ": note:" not in line:
                number = int(place["line"])
                yield self._finding(name, place["path"], number, place["text"])

    def _finding(self, tool: str, path: str, line: int, text: str) -> Finding:
        lines = (self._folder / path).read_text("utf-8", "replace").splitlines()
        content = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return Finding(tool, path, line, text, content)


def _json(
    done: Completed, name: str, expected: tuple[int, ...]
) -> list[dict[str, Any]]:
    if done.returncode in expected:
        entries: list[dict[str, Any]] = json.loads(done.stdout)
        return entries
    raise CheckFailed(
        f"{name} broke with exit status {done.returncode}",
        detail=done.last_lines(15),
        hint="tox -e apply-and-test",
    )
