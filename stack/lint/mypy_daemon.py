# SPDX-License-Identifier: Apache-2.0
"""What takes the place of `mypy` where one release is linted step after step: mypy's
own daemon, which stays for the next step.

A change of one module makes `mypy` check all modules that import each other again, and
vLLM's nearly all do: 9 s for a step, where the daemon takes 1 s. The daemon refuses
`follow_imports = "silent"`, vLLM's setting, so it follows imports the normal way, and
errors in files that were not named are left out here, as `silent` would leave them out.

This file is a program of its own, started by the wrapper that `put_first` writes. Its
first argument is the daemon's status file, the others are those of `mypy`. What names
its own way to follow imports goes to `mypy` itself, and so does everything that the
daemon does not find in order: it may have died, the path of its socket may be too long,
or a file that cannot be parsed kept it from looking at others.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_STATUS = "dmypy.json"
_ERRORS = 1
"""mypy's exit status where it found errors."""
_NOT_PARSED = "[syntax]"
"""Ends the daemon's line about a file after which it looks at no other."""


def put_first(folder: Path, programs: Path) -> Path:
    """Write a `mypy` that asks the daemon of `programs` into `folder`, which gets the
    daemon's files, too. Return the folder."""
    folder.mkdir(exist_ok=True)
    words = map(str, (programs / "python", __file__, folder / _STATUS))
    script = folder / "mypy"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o755)
    return folder


def end_all(work: Path) -> None:
    """End the daemons of the folders below `work`, as far as they still run."""
    for status in work.rglob(_STATUS):
        # It may be half-written, and its number may be another process's by now.
        with contextlib.suppress(OSError, ValueError, KeyError):
            daemon = json.loads(status.read_bytes())["pid"]
            if b"dmypy" in Path(f"/proc/{daemon}/cmdline").read_bytes():
                os.kill(daemon, signal.SIGKILL)


def _counts(line: str, named: Sequence[str]) -> bool:
    """Whether a line is an error in a file that was named, or one that kept the daemon
    from looking at it."""
    own = line.partition(":")[0] in named and ": error: " in line
    return own or line.endswith(_NOT_PARSED)


def main() -> int:
    status, *words = sys.argv[1:]
    programs = str(Path(sys.executable).parent)
    if "--follow-imports" not in words:
        command = [f"{programs}/dmypy", "--status-file", status, "run", "--"]
        done = subprocess.run(
            [*command, "--follow-imports", "normal", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = done.stdout.splitlines()
        if done.returncode == 0 or (
            done.returncode == _ERRORS
            and lines[-1:]
            and lines[-1].startswith("Found ")
            and not any(_counts(line, words) for line in lines)
        ):
            return 0
    return subprocess.run([f"{programs}/mypy", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
