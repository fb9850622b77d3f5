# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs, each in a fork of a process that has imported what they share.

Importing torch and Triton takes seconds, and a program must not see what the one before
it changed there. The standard library alone: these tests run on a GPU's machine, too,
which has no xpustack.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Forks:
    """The process with `modules` imported; leaving the context ends it.

    Args:
        modules: imported in order, before the first fork.
        env: the whole environment, of the imports and of each program.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str], cwd: Path):
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, words: Sequence[str], output: Path) -> tuple[int, str]:
        """The exit status and the output of `python *words`: of a script, or of `-m`
        and a module."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([*words, str(output)]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process with the imports ended: {self._process.wait()}"
        return int(answer), output.read_text()


def _main() -> Any:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        *words, output = json.loads(line)
        process = os.fork()
        if process == 0:
            # What it raises, this program raises.
            return _run(words, output)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(words: list[str], output: str) -> Any:
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, target)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        return runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    return runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _main()
