# SPDX-License-Identifier: Apache-2.0
"""Child processes that can be stopped together, with everything they started."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xpustack.errors import EnvironmentProblem

_KEPT = (
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "TMPDIR",
    "CC",
    "CXX",
)
TIMED_OUT = 124


class Stopped(Exception):
    """The work was interrupted; nothing may be concluded or stored from it."""


@dataclass(frozen=True)
class Completed:
    """How a command ended: its exit status (124: past its limit), stdout,
    stdout and stderr as they came if not split, and wall seconds."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def last_lines(self, count: int = 30) -> tuple[str, ...]:
        return tuple(self.output.rstrip().splitlines()[-count:])


class Runner:
    """Starts commands in process groups of their own and can stop them all."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        timeout: float,
    ) -> Completed:
        """Run `command` to its end, or kill its whole group after `timeout` s.

        Raises:
            Stopped: `stop` was called before or meanwhile.
            EnvironmentProblem: the program does not exist.
        """
        begin = time.monotonic()
        with self._guard:
            if self._stopped:
                raise Stopped
            try:
                child = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise EnvironmentProblem(
                    f"cannot start {command[0]}",
                    detail=[str(error)],
                    hint="tox -e apply-and-test",
                ) from error
            self._running.add(child)
        try:
            stdout, stderr = child.communicate(timeout=timeout)
            returncode = child.returncode
        except subprocess.TimeoutExpired:
            _kill(child, signal.SIGKILL)
            stdout, stderr = child.communicate()
            stderr += f"\nkilled after {timeout:.0f} s: {shlex.join(command)}\n"
            returncode = TIMED_OUT
        finally:
            _kill(child, signal.SIGKILL)
            with self._guard:
                self._running.discard(child)
        if self._stopped:
            raise Stopped
        return Completed(returncode, stdout, stderr, time.monotonic() - begin)

    def stop(self) -> None:
        """Kill what runs, and refuse to start anything more."""
        with self._guard:
            self._stopped = True
            for child in self._running:
                _kill(child, signal.SIGKILL)


def clean_environment(**extra: str) -> dict[str, str]:
    """An environment that a user's settings cannot bend: this interpreter's own
    programs first on PATH, no user site, one thread, fixed hash seed and
    locale, and nothing else of the caller's than where files may be kept."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    programs = str(Path(sys.executable).parent)
    environment |= {
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return environment | extra


def _kill(child: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
