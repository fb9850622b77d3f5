# SPDX-License-Identifier: Apache-2.0
"""What takes the place of `mypy` where one release is linted step after step: mypy's
own daemon, which stays for the next step.

A change of one module makes `mypy` check all modules that import each other again, and
vLLM's nearly all do: 9 s for a step, where the daemon takes 1 s. It refuses
`follow_imports = "silent"`, vLLM's setting, so it follows imports the normal way, and
errors in files that were not named are left out here, as `silent` would leave them out.

This file is a program of its own, started by the wrapper that `put_first` writes. Its
first argument is the daemon's status file, the others are those of `mypy`. What names
its own way to follow imports goes to `mypy` itself, and so does everything for which
the daemon has no verdict: it may have died, or the path of its socket is too long.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

_STATUS = "dmypy.json"
_ERRORS = 1
"""mypy's exit status where it found errors and could check everything."""


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
    """End the daemons of the folders below `work`."""
    for status in work.rglob(_STATUS):
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(status.read_bytes())["pid"], signal.SIGKILL)


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
        counted = "".join(lines[-1:]).startswith("Found ")
        if done.returncode == 0 or (done.returncode == _ERRORS and counted):
            lines = [line for line in lines if line.partition(":")[0] in words]
            print(*lines, sep="\n")
            return _ERRORS if any(": error: " in line for line in lines) else 0
    return subprocess.run([f"{programs}/mypy", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
