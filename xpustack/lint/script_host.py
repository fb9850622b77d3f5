# SPDX-License-Identifier: Apache-2.0
"""Run Python scripts one after the other, each in a fork of this process.

This file is a program of its own, started by `hook_runner`; it needs only the
standard library. It imports once what the scripts have in common. Its arguments are
two files: it reads the commands from the first and writes their results to the second.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

_PRELOADED = ("argparse", "ast", "dataclasses", "pathlib", "regex", "subprocess")


def main() -> None:
    """Run every command of the first file, and write the second."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with open(sys.argv[1], encoding="utf-8") as file:
        commands = json.load(file)
    results = [_run(command) for command in commands]
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(results, file)


def _run(arguments: list[str]) -> dict[str, Any]:
    begin = time.monotonic()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = os.fork()
        if process == 0:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            _become(arguments)
        _, status = os.waitpid(process, 0)
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
    return {
        "returncode": os.waitstatus_to_exitcode(status),
        "stdout": texts[0],
        "stderr": texts[1],
        "seconds": time.monotonic() - begin,
    }


def _become(arguments: list[str]) -> NoReturn:
    """Become `python ARGUMENTS`, and exit as it would."""
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.abspath(os.path.dirname(arguments[0])))
    status = 1
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
