# SPDX-License-Identifier: Apache-2.0
"""Run the base's own linters on some files of a tree that is checked out."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stack.core import fingerprint
from stack.core.checkout import Checkout
from stack.core.errors import CheckFailed, EnvironmentProblem, in_tox
from stack.core.process import Completed, Runner, clean_environment
from stack.forks.server import Server
from stack.lint import mypy_daemon
from stack.lint.hook_configuration import PRE_COMMIT_FILE, Hook, Hooks
from stack.lint.hook_environment import make_hook_environment

TIMEOUT = 600.0
_PLACE = re.compile(r"^\s*(?P<path>[^\s:]+):(?P<line>\d+)(?::\d+)*:\s*(?P<text>.*)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(r"\bline \d+")


@dataclass(frozen=True)
class LintFinding:
    """One complaint. `content` is the stripped source line: it identifies the
    complaint on another line number. `line` is 0 if it has no line."""

    tool: str
    path: str
    line: int
    text: str
    content: str

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.tool, self.path, _NUMBER.sub("line", self.text)

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.tool}: {self.text}"


@dataclass
class HookRunner:
    """Runs a base's hooks in a checkout; keeps their names and the total time.

    Args:
        work: where linters may write.
        daemon: whether mypy's daemon checks types, and stays in `work`.
    """

    runner: Runner
    server: Server
    hooks: Hooks
    checkout: Checkout
    work: Path
    daemon: bool = False
    tools: dict[str, None] = field(default_factory=dict)
    seconds: float = 0.0

    def findings(
        self, tree: str, paths: Iterable[str], types: bool
    ) -> list[LintFinding]:
        """Check a tree out, and lint those of `paths` that it has; mypy runs only if
        `types`."""
        self._move(tree)
        folder, hidden = self.checkout.work_tree, re.compile(self.hooks.exclude)
        present = [p for p in paths if (folder / p).is_file() and not hidden.search(p)]
        python = [p for p in present if p.endswith((".py", ".pyi"))]
        findings: list[LintFinding] = []
        if self.hooks.ruff and python:
            installed = fingerprint.installed_version("ruff") or "none"
            if installed != self.hooks.ruff:
                raise EnvironmentProblem(
                    f"ruff=={self.hooks.ruff} is needed, {installed} is installed",
                    detail=[f"the base's {PRE_COMMIT_FILE} pins it"],
                    again=in_tox,
                )
            findings += self._ruff_check(python)
            findings += self._ruff_format(python)
        if self.hooks.typos and present and fingerprint.installed_version("typos"):
            findings += self._typos(present)
        for hook in self.hooks.scripts:
            findings += self._script(hook, present, self._forked)
        # check_spdx_header.py adds a missing header to the file.
        self._move(tree)
        if types and self.hooks.mypy:
            findings += self._script(self.hooks.mypy, present, self._in_own_environment)
        return findings

    def _move(self, tree: str) -> None:
        """Make the files those of a tree, whatever a linter wrote."""
        self.checkout.clean()
        self.checkout.check_out(tree)

    def _environment(self, **more: str) -> dict[str, str]:
        return clean_environment(
            RUFF_CACHE_DIR=str(self.work / "ruff"),
            TMPDIR=str(self.work),
            PYTHONDONTWRITEBYTECODE="1",
            PYTHONUTF8="1",
            **more,
        )

    def _run(self, name: str, command: list[str], **more: str) -> Completed:
        env = self._environment(**more)
        folder = self.checkout.work_tree
        return self._done(
            name, self.runner.run(command, cwd=folder, env=env, timeout=TIMEOUT)
        )

    def _done(self, name: str, done: Completed) -> Completed:
        self.tools[name] = None
        self.seconds += done.seconds
        return done

    def _ruff_check(self, paths: list[str]) -> Iterator[LintFinding]:
        options = ["--force-exclude", "--output-format=concise", "--quiet", "--"]
        done = self._run("ruff check", ["ruff", "check", *options, *paths])
        if done.returncode not in (0, 1):
            raise _tool_failure("ruff check", done)
        # The mark of what ruff could repair.
        lines = done.stdout.replace(" [*] ", " ").splitlines()
        return self._located("ruff check", lines, paths)

    def _ruff_format(self, paths: list[str]) -> Iterator[LintFinding]:
        options = ["--force-exclude", "--diff", "--"]
        done = self._run("ruff format", ["ruff", "format", *options, *paths])
        if done.returncode not in (0, 1):
            # A file that does not parse; ruff check says where.
            return
        path = ""
        for line in done.stdout.splitlines():
            if line.startswith("--- "):
                path = line.removeprefix("--- ")
            elif line.startswith("-"):
                content = line[1:].strip()
                yield LintFinding(
                    "ruff format", path, 0, "would be reformatted", content
                )

    def _typos(self, paths: list[str]) -> Iterator[LintFinding]:
        options = ["--force-exclude", "--format=json", "--"]
        done = self._run("typos", ["typos", *options, *paths])
        for line in done.stdout.splitlines():
            message = json.loads(line)
            if message.get("type") == "typo":
                corrections = ", ".join(message["corrections"])
                path = message["path"].removeprefix("./")
                text = f"{message['typo']} should be {corrections}"
                yield self._finding("typos", path, message.get("line_num", 0), text)

    def _in_own_environment(self, hook: Hook, words: list[str]) -> Completed:
        """Run a hook's script, with the hook's own packages alone."""
        name = fingerprint.digest(packages=sorted(hook.additional_dependencies))
        folder = self.work / name[:16]
        if not folder.exists():
            make_hook_environment(folder, hook.additional_dependencies)
        programs = folder / "bin"
        first = [programs]
        if self.daemon:
            first.insert(0, mypy_daemon.put_first(folder / "daemon", programs))
        path = os.pathsep.join([*map(str, first), self._environment()["PATH"]])
        cache = str(self.work / "mypy")
        command = [str(programs / "python"), *words]
        return self._run(hook.id, command, PATH=path, MYPY_CACHE_DIR=cache)

    def _forked(self, hook: Hook, words: list[str]) -> Completed:
        """Run a hook's script in a fork of the server."""
        completed = self.server.complete(
            words,
            cwd=self.checkout.work_tree,
            env=self._environment(),
            output=self.work / "output.txt",
            limit=TIMEOUT,
        )
        return self._done(hook.id, completed)

    def _script(
        self,
        hook: Hook,
        present: Iterable[str],
        run: Callable[[Hook, list[str]], Completed],
    ) -> Iterator[LintFinding]:
        """What a script of the base finds in the files that it wants."""
        paths = [path for path in present if hook.wanted(path)]
        done = run(hook, [*hook.script, *paths]) if paths else None
        if done is None or done.returncode == 0:
            return
        lines = _COLOUR.sub("", done.output).splitlines()
        located = list(self._located(hook.id, lines, paths))
        blocked = "errors prevented further checking" in done.output
        if "Traceback (most recent call last)" in done.output or (
            blocked and not located
        ):
            raise _tool_failure(f"the base's hook {hook.id}", done, hook.script[0])
        yield from located
        if not located:
            for line in filter(None, (line.strip() for line in lines)):
                yield LintFinding(hook.id, hook.script[0], 0, line, "")

    def _located(
        self, name: str, lines: Iterable[str], paths: Sequence[str]
    ) -> Iterator[LintFinding]:
        for line in lines:
            place = _PLACE.match(line)
            if place is None:
                if line.strip() in paths:
                    yield LintFinding(name, line.strip(), 0, "refused", "")
            elif place["path"] in paths and ": note:" not in line:
                number = int(place["line"])
                yield self._finding(name, place["path"], number, place["text"])

    def _finding(self, tool: str, path: str, line: int, text: str) -> LintFinding:
        file = self.checkout.work_tree / path
        lines = file.read_text("utf-8", "replace").splitlines()
        content = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return LintFinding(tool, path, line, text, content)


def _tool_failure(what: str, done: Completed, path: str | None = None) -> CheckFailed:
    return CheckFailed(
        f"{what} failed to run: exit status {done.returncode}",
        path=path,
        detail=done.last_lines(15),
        again=in_tox,
    )
