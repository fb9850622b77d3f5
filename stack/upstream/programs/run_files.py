# SPDX-License-Identifier: Apache-2.0
"""Run files of vLLM's own tests, each in a process of its own, and write the outcomes.

    python run_files.py FILES.json OUTCOMES.json [--jobs N] [--seconds N]
        [--ahead MODULE]... [-- WORDS FOR PYTEST]

It is started in the folder that holds vLLM's `tests`, with the environment that the
tests shall see, and needs pytest and what vLLM needs. FILES.json lists the files. Of
each file OUTCOMES.json has `tests` (an outcome by name), `reasons` (of those that
failed), `problem` (why there is none) and `seconds`.

Each process is a fork of one that has imported the modules of `--ahead`. It must not
have started the GPU.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

_RANK = {"passed": 0, "skipped": 1, "xpassed": 2, "xfailed": 3, "error": 4, "failed": 5}
_LONGEST = 300


class Outcomes:
    """A pytest plugin: the worst outcome of a test's set-up, call and tear-down, and
    why a file was not collected. They are written after each test: a file that is
    killed keeps those of the tests that ended."""

    def __init__(self, out: Path) -> None:
        self.tests: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.problem = ""
        self._out = out

    def write(self) -> None:
        content = {
            "tests": self.tests,
            "reasons": self.reasons,
            "problem": self.problem,
        }
        temporary = self._out.with_suffix(".part")
        temporary.write_text(json.dumps(content))
        temporary.replace(self._out)

    def pytest_runtest_logfinish(self) -> None:
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if report.outcome == "passed" else "xfailed"
        elif report.failed and report.when != "call":
            outcome = "error"
        name = report.nodeid.partition("::")[2]
        if _RANK[outcome] >= _RANK[self.tests.get(name, "passed")]:
            self.tests[name] = outcome
            if report.failed:
                self.reasons[name] = _failure(report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed" and not self.problem:
            self.problem = f"{report.outcome}: {_reason(report.longrepr)}"


def _failure(longrepr: object) -> str:
    """The first line of what a test raised."""
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message.partition("\n")[0] if crash else _reason(longrepr)
    return str(text)[:_LONGEST]


def _reason(longrepr: object) -> str:
    """The last line of a traceback, or the reason of a skip."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    lines = [line.removeprefix("E").strip() for line in text.splitlines()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or [line for line in lines if line] or [""])[-1][:_LONGEST]


def run_file(file: str, words: list[str], out: Path) -> None:
    """Run one file in this process, and write its outcomes."""
    outcomes = Outcomes(out)
    status = pytest.main(["-q", "-p", "no:cacheprovider", *words, file], [outcomes])
    if not outcomes.tests and not outcomes.problem:
        outcomes.problem = f"pytest ended with exit status {int(status)}"
    outcomes.write()


def start(file: str, words: list[str], out: Path) -> int:
    """Fork a process that runs a file; what it prints is written beside `out`."""
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        output = os.open(out.with_suffix(".log"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        run_file(file, words, out)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def main() -> int:
    words = sys.argv[1:]
    own, _, for_pytest = " ".join(words).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path)
    parser.add_argument("outcomes", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="for one file")
    parser.add_argument("--ahead", action="append", default=[])
    options = parser.parse_args(own.split())
    for module in options.ahead:
        importlib.import_module(module)
    sys.path.insert(0, os.getcwd())
    waiting: list[str] = json.loads(options.files.read_text())
    running: dict[int, tuple[str, Path, float]] = {}
    found: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            file = waiting.pop(0)
            name = f"{options.outcomes.stem}-{file.replace('/', '-')}.json"
            out = options.outcomes.with_name(name)
            process = start(file, for_pytest.split(), out)
            running[process] = file, out, time.monotonic()
        time.sleep(0.05)
        for process, (file, out, begin) in list(running.items()):
            seconds = time.monotonic() - begin
            ended, _ = os.waitpid(process, os.WNOHANG)
            late = not ended and seconds > options.seconds
            if not ended and not late:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            if late:
                os.waitpid(process, 0)
            del running[process]
            content = {"tests": {}, "problem": "its process died"}
            if out.is_file():
                content = json.loads(out.read_text())
                out.unlink()
            if late:
                content["problem"] = "it was killed at its limit"
            found[file] = {**content, "seconds": round(seconds, 1)}
            print(f"{seconds:6.1f} s {file} {content['problem']}", flush=True)
            options.outcomes.write_text(json.dumps(found, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
