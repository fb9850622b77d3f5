# SPDX-License-Identifier: Apache-2.0
"""Runs a stage's programs, each with a time limit, a log and its own session.

A driver that hangs can leave a process that cannot be killed. The stage ends without
it, and its result says so.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xpustack.core.process import TIMED_OUT, Runner, kill_group
from xpustack.core.progress import Progress

GRACE = 10.0
"""Seconds that a killed process has to go."""
EVERY = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        returncode: its exit status; 124 after its time limit.
        stuck: it did not even end when it was killed.
    """

    returncode: int
    seconds: float
    stuck: bool = False

    @property
    def timed_out(self) -> bool:
        return self.returncode == TIMED_OUT


def run(
    runner: Runner,
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    limit: float,
    log: Path,
    progress: Progress,
) -> Ended:
    """Run a program to its end or `limit` seconds, output to `log`.

    `progress` gets the newest line of the log every few seconds.

    Raises:
        Stopped: the run was interrupted.
        EnvironmentProblem: the program does not exist.
    """
    begin = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        place = output.tell()
        child = runner.start(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    said = ""
    while True:
        left = limit - (time.monotonic() - begin)
        try:
            returncode = child.wait(timeout=max(0.0, min(EVERY, left)))
            kill_group(child.pid)
            return Ended(returncode, time.monotonic() - begin)
        except subprocess.TimeoutExpired:
            if left <= EVERY and limit <= time.monotonic() - begin:
                break
        line = _last_line(log, place)
        if line != said:
            progress(line)
            said = line
    kill_group(child.pid)
    try:
        child.wait(timeout=GRACE)
        stuck = False
    except subprocess.TimeoutExpired:
        stuck = True
    return Ended(TIMED_OUT, time.monotonic() - begin, stuck)


def tail(log: Path, count: int = 15) -> list[str]:
    """The last lines of a log."""
    try:
        return log.read_text("utf-8", "replace").rstrip().splitlines()[-count:]
    except FileNotFoundError:
        return []


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - 4096))
        lines = file.read().decode("utf-8", "replace").split("\n")
    whole = [line.strip() for line in lines[:-1] if line.strip()]
    return whole[-1][:160] if whole else ""
