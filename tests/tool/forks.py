# SPDX-License-Identifier: Apache-2.0
"""Runs of the tool that start fast and die when they are told to."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tiny_stack import TinyStack

PROGRAM = Path(__file__).with_name("fork_program.py")


@dataclass(frozen=True)
class ForkedRun:
    """How a run ended.

    Attributes:
        status: the exit status; negative where a signal ended the run.
        changes: the names of the changes of files that it made, each once, in order;
            `fork_program.Changes` says what they look like.
    """

    status: int
    stdout: str
    stderr: str
    changes: tuple[str, ...]
    seconds: float

    @property
    def killed(self) -> bool:
        return self.status in (-signal.SIGKILL, -signal.SIGXFSZ)


class Forks:
    """Forks runs of the tool from the process `fork_program.py`."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process, self._output = process, output

    def run(
        self,
        stack: TinyStack,
        words: Sequence[str],
        *,
        die_at: str | None = None,
        die_after: float | None = None,
        programs: Path | None = None,
        wheels: Path | None = None,
    ) -> ForkedRun:
        """Run `xpustack WORDS` in a stack; its temporary folder is `root/tmp`.

        Args:
            die_at: the change of a file, as `ForkedRun.changes` names it, at which the
                run is killed.
            die_after: the seconds after which it is killed.
            programs: a folder to be first on PATH.
            wheels: a folder that keeps wheels: pip builds none that it has.
        """
        begin = time.monotonic()
        environment = {**stack.environment, "TMPDIR": str(stack.root / "tmp")}
        if programs is not None:
            environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
        self._send(
            {
                "words": words,
                "cwd": str(stack.project.root),
                "environment": environment,
                "root": str(stack.root),
                "output": str(self._output),
                "die_at": die_at,
                "wheels": None if wheels is None else str(wheels),
            }
        )
        child = self._answer()
        if die_after is not None:
            ready, _, _ = select.select([self._process.stdout], [], [], die_after)
            if not ready:
                os.kill(child, signal.SIGKILL)
        status = self._answer()
        text = {
            name: (self._output / name).read_text()
            for name in ("stdout", "stderr", "changes")
        }
        changes = tuple(dict.fromkeys(text["changes"].splitlines()))
        seconds = time.monotonic() - begin
        return ForkedRun(status, text["stdout"], text["stderr"], changes, seconds)

    def _send(self, request: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def forking() -> Iterator[Forks]:
    """A `Forks` for the time of the block."""
    with (
        tempfile.TemporaryDirectory() as output,
        subprocess.Popen(
            [sys.executable, PROGRAM],
            # Without a buffer, `select` knows whether an answer is there.
            bufsize=0,
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
    ):
        yield Forks(process, Path(output))
        assert process.stdin is not None
        process.stdin.close()
