# SPDX-License-Identifier: Apache-2.0
"""Run the base's own linters on some files of a tree, which is checked out and moves to
the next one by writing only what differs."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from xpustack.base.store import Store
from xpustack.core import fingerprint
from xpustack.core.checkout import Checkout
from xpustack.core.errors import CheckFailed
from xpustack.core.process import Completed, Runner, clean_environment, program
from xpustack.forks.server import Server
from xpustack.lint.finding import LintFinding
from xpustack.lint.hook_configuration import PRE_COMMIT_FILE, Hooks, Script
from xpustack.lint.hook_environment import make_hook_environment
from xpustack.series.tree import Tree

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


class MovingTree:
    """The files of one tree in the new directory `folder`, with their git `index`."""

    def __init__(self, store: Store, folder: Path, index: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._git = Checkout(store.cache.objects, work_tree=folder, index=index)
        self._tree: str | None = None

    def move(self, tree: Tree) -> None:
        """Make the folder hold `tree`.

        Raises:
            EnvironmentProblem: the disk is full, or writing there is denied.
        """
        if self._tree is None:
            self._git.check_out(tree.tree_id)
        else:
            self.restore()
            self._git.switch(self._tree, tree.tree_id)
        self._tree = tree.tree_id

    def restore(self) -> None:
        """Undo what anything else wrote into the folder."""
        self._git.restore()


class HookRunner:
    """Runs a base's hooks in `tree`; keeps their names and the total time."""

    def __init__(
        self,
        runner: Runner,
        server: Server,
        hooks: Hooks,
        tree: MovingTree,
        work: Path,
    ) -> None:
        self._runner, self._server = runner, server
        self._hooks, self._tree = hooks, tree
        self._folder, self._work = tree.folder, work
        self._env = base_environment(work)
        self.tools: dict[str, None] = {}
        self.seconds = 0.0

    def findings(self, paths: Iterable[str], *, types: bool) -> list[LintFinding]:
        """All findings in those of `paths` that exist in the folder now; mypy's only
        if `types`."""
        present = self._hooks.visible(p for p in paths if (self._folder / p).is_file())
        python = [p for p in present if p.endswith((".py", ".pyi"))]
        findings: list[LintFinding] = []
        if self._hooks.ruff and python:
            fingerprint.require(
                "ruff", self._hooks.ruff, f"the base's {PRE_COMMIT_FILE} pins it"
            )
            findings += self._ruff_check(python)
            findings += self._ruff_format(python)
        if self._hooks.typos and present and fingerprint.installed_version("typos"):
            findings += self._typos(present)
        findings += self._scripts(present)
        return findings + self._types(present) if types else findings

    def _run(self, name: str, command: list[str]) -> Completed:
        done = self._runner.run(
            command, cwd=self._folder, env=self._env, timeout=TIMEOUT
        )
        self.tools[name] = None
        self.seconds += done.seconds
        return done

    def _ruff_check(self, paths: list[str]) -> Iterator[LintFinding]:
        options = ["--force-exclude", "--output-format=concise", "--quiet", "--"]
        done = self._run("ruff check", [*program("ruff"), "check", *options, *paths])
        if done.returncode not in (0, 1):
            raise _tool_failure("ruff check", done)
        # The mark of what ruff could repair.
        lines = done.stdout.replace(" [*] ", " ").splitlines()
        return self._located("ruff check", lines, paths)

    def _ruff_format(self, paths: list[str]) -> Iterator[LintFinding]:
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
                yield LintFinding(
                    "ruff format", path, 0, "would be reformatted", content
                )

    def _typos(self, paths: list[str]) -> Iterator[LintFinding]:
        typos = shutil.which("typos", path=self._env["PATH"]) or "typos"
        done = self._run(
            "typos", [typos, "--force-exclude", "--format=json", "--", *paths]
        )
        for line in done.stdout.splitlines():
            message = json.loads(line)
            if message.get("type") == "typo":
                corrections = ", ".join(message["corrections"])
                path = message["path"].removeprefix("./")
                text = f"{message['typo']} should be {corrections}"
                yield self._finding("typos", path, message.get("line_num", 0), text)

    def _types(self, present: list[str]) -> list[LintFinding]:
        """What mypy finds, called by the base's script in the hook's environment."""
        script = self._hooks.mypy
        paths = [path for path in present if script and script.wanted(path)]
        if script is None or not paths:
            return []
        name = fingerprint.digest(packages=sorted(script.packages))
        folder = self._work / name[:16]
        if not folder.exists():
            make_hook_environment(folder, script.packages)
        programs = folder / "bin"
        done = self._runner.run(
            [str(programs / "python"), *script.arguments, *paths],
            cwd=self._folder,
            env={
                **self._env,
                "PATH": f"{programs}{os.pathsep}{self._env['PATH']}",
                "MYPY_CACHE_DIR": str(self._work / "mypy"),
            },
            timeout=TIMEOUT,
        )
        self.tools[script.name] = None
        self.seconds += done.seconds
        return list(self._script_findings(script, paths, done))

    def _scripts(self, present: list[str]) -> list[LintFinding]:
        """The findings of the other scripts."""
        findings: list[LintFinding] = []
        for script in self._hooks.scripts:
            if paths := [path for path in present if script.wanted(path)]:
                done = self._forked([*script.arguments, *paths])
                self.tools[script.name] = None
                findings += self._script_findings(script, paths, done)
        # check_spdx_header.py adds a missing header to the file.
        self._tree.restore()
        return findings

    def _forked(self, words: list[str]) -> Completed:
        """Run a script in a fork of the server."""
        output = self._work / "output.txt"
        done = self._server.run(
            words,
            cwd=self._folder,
            path=[],
            env=self._env,
            output=output,
            limit=TIMEOUT,
        )
        self.seconds += done.seconds
        text = output.read_text("utf-8", "replace")
        return Completed(done.status, text, done.died, done.seconds)

    def _script_findings(
        self, script: Script, paths: Sequence[str], done: Completed
    ) -> Iterator[LintFinding]:
        """The findings in a script's output."""
        if done.returncode == 0:
            return
        lines = _COLOUR.sub("", done.output).splitlines()
        located = list(self._located(script.name, lines, paths))
        blocked = "errors prevented further checking" in done.output
        if "Traceback (most recent call last)" in done.output or (
            blocked and not located
        ):
            raise _tool_failure(
                f"the base's hook {script.name}", done, script.arguments[0]
            )
        yield from located
        if not located:
            for line in filter(None, (line.strip() for line in lines)):
                yield LintFinding(script.name, script.arguments[0], 0, line, "")

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
        lines = (self._folder / path).read_text("utf-8", "replace").splitlines()
        content = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return LintFinding(tool, path, line, text, content)


def _tool_failure(what: str, done: Completed, path: str | None = None) -> CheckFailed:
    return CheckFailed(
        f"{what} failed to run: exit status {done.returncode}",
        path=path,
        detail=done.last_lines(15),
        hint="tox -e apply-and-test",
    )
