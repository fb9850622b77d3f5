# SPDX-License-Identifier: Apache-2.0
"""Run `xpustack` with some words in this process."""

import contextlib
import io
from dataclasses import dataclass

from xpustack.__main__ import call


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*words: object) -> Result:
    """What the command line does with these words."""
    code = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            call([str(word) for word in words])
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
    return Result(code, stdout.getvalue(), stderr.getvalue())
