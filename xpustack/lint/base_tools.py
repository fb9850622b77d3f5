# SPDX-License-Identifier: Apache-2.0
"""The base's own linters, run on some files of a checked-out tree."""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from xpustack.core import fingerprint
from xpustack.core.errors import CheckFailed
from xpustack.core.process import Completed, Runner, clean_environment, program
from xpustack.lint import hooks, script_host
from xpustack.lint.finding import Finding
from xpustack.lint.hooks import Hooks, Script
from xpustack.lint.moving_tree import MovingTree
from xpustack.lint.mypy_calls import Recorder
from xpustack.lint.warm_mypy import WarmMypy

TIMEOUT = 600.0
_PLACE = re.compile(r"^\s*(?P<path>[^\s:]+):(?P<line>\d+)(?::\d+)*:\s*(?P<text>.*)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def base_environment(work: Path) -> dict[str, str]:
    """The environment of every linter; `work` is where they may write."""
    return clean_environment(
        RUFF_CACHE_DIR=str(work / "ruff"),
        TMPDIR=str(work),
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONUTF8="1",
    )


class Linters:
    """Runs what a base asks for in `tree`, and adds up what ran and how long."""

    def __init__(
        self,
        runner: Runner,
        asked: Hooks,
        tree: MovingTree,
        work: Path,
        mypy: WarmMypy,
    ) -> None:
        self._runner, self._asked, self._tree = runner, asked, tree
        self._folder, self._work, self._mypy = tree.folder, work, mypy
        self._env = base_environment(work)
        self.tools: dict[str, None] = {}
        self.seconds = 0.0

    def findings(self, paths: Iterable[str]) -> list[Finding]:
        """All findings in those of `paths` that exist in the folder now."""
        present = self._asked.visible(p for p in paths if (self._folder / p).is_file())
        python = [p for p in present if p.endswith((".py", ".pyi"))]
        found: list[Finding] = []
        if self._asked.ruff and python:
            fingerprint.require(
                "ruff", self._asked.ruff, f"the base's {hooks.CONFIGURATION} pins it"
            )
            found += self._ruff_check(python)
            found += self._ruff_format(python)
        if self._asked.typos and present and fingerprint.installed_version("typos"):
            found += self._typos(present)
        return found + self._scripts(present)

    def _run(self, name: str, command: list[str]) -> Completed:
        done = self._runner.run(
            command, cwd=self._folder, env=self._env, timeout=TIMEOUT
        )
        self.tools[name] = None
        self.seconds += done.seconds
        return done

    def _ruff_check(self, paths: list[str]) -> Iterator[Finding]:
        options = ["--force-exclude", "--output-format=json", "--"]
        done = self._run("ruff check", [*program("ruff"), "check", *options, *paths])
        for entry in _json(done, "ruff check", (0, 1)):
            path = Path(entry["filename"]).relative_to(self._folder).as_posix()
            text = f"{entry['code']} {entry['message']}"
            yield self._finding("ruff check", path, entry["location"]["row"], text)

    def _ruff_format(self, paths: list[str]) -> Iterator[Finding]:
        options = ["--force-exclude", "--diff", "--"]
        done = self._run("ruff format", [*program("ruff"), "format", *options, *paths])
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
        typos = shutil.which("typos", path=self._env["PATH"]) or "typos"
        done = self._run(
            "typos", [typos, "--force-exclude", "--format=json", "--", *paths]
        )
        for line in done.stdout.splitlines():
            entry = json.loads(line)
            if entry.get("type") == "typo":
                better = ", ".join(entry["corrections"])
                path = entry["path"].removeprefix("./")
                text = f"{entry['typo']} should be {better}"
                yield self._finding("typos", path, entry.get("line_num", 0), text)

    def _scripts(self, present: list[str]) -> list[Finding]:
        """What mypy and the other scripts say. mypy's own only tells how to call it."""
        recorder = Recorder(self._work)
        mypy = self._asked.mypy
        scripts = [*([mypy] if mypy else []), *self._asked.scripts]
        chosen = [
            (script, paths)
            for script in scripts
            if (paths := [path for path in present if script.wanted(path)])
        ]
        commands = [
            {
                "arguments": [*script.arguments, *paths],
                "env": recorder.env(self._env) if script is mypy else {},
            }
            for script, paths in chosen
        ]
        found: list[Finding] = []
        ended = self._hosted(commands) if commands else []
        calls = recorder.calls()
        for (script, paths), done in zip(chosen, ended, strict=True):
            self.tools[script.name] = None
            if script is not mypy or not calls:
                found += self._judged(script, paths, done)
        # check_spdx_header.py adds a missing header to the file.
        self._tree.restore()
        for call in calls:
            assert mypy is not None
            files = [path for path in call if path in present]
            flags = [argument for argument in call if argument not in files]
            done = self._mypy.check(flags, files)
            self.seconds += done.seconds
            found += self._judged(mypy, files, done)
        return found

    def _hosted(self, commands: list[dict[str, Any]]) -> list[Completed]:
        """How the commands ended, which one process of Python ran in its forks."""
        asked, told = self._work / "commands.json", self._work / "ended.json"
        asked.write_bytes(msgspec.json.encode(commands))
        told.unlink(missing_ok=True)
        done = self._runner.run(
            [sys.executable, "-P", script_host.__file__, str(asked), str(told)],
            cwd=self._folder,
            env=self._env,
            timeout=TIMEOUT,
        )
        self.seconds += done.seconds
        if done.returncode:
            raise _broke("the base's hooks", done)
        return msgspec.json.decode(told.read_bytes(), type=list[Completed])

    def _judged(
        self, script: Script, paths: Sequence[str], done: Completed
    ) -> Iterator[Finding]:
        """The findings of a script, by its output."""
        if done.returncode == 0:
            return
        lines = _COLOUR.sub("", done.output).splitlines()
        placed = list(self._placed(script.name, lines, paths))
        blocked = "errors prevented further checking" in done.output
        if "Traceback (most recent call last)" in done.stderr or (
            blocked and not placed
        ):
            raise _broke(f"the base's hook {script.name}", done, script.arguments[0])
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
    raise _broke(name, done)


def _broke(what: str, done: Completed, path: str | None = None) -> CheckFailed:
    return CheckFailed(
        f"{what} could not do its work: exit status {done.returncode}",
        path=path,
        detail=done.last_lines(15),
        hint="tox -e apply-and-test",
    )
