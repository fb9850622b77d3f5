# SPDX-License-Identifier: Apache-2.0
"""Child processes that can be stopped together, with everything they started. They
end when the tool ends, even if it is killed. And how many can run at a time."""

import atexit
import contextlib
import itertools
import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from stack.core import warden
from stack.core.errors import EnvironmentProblem, in_tox
from stack.core.warden import FAMILY, kill_family

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
_CGROUPS = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count(1)


class Stopped(Exception):
    """The work was interrupted: its results are incomplete and must not be stored."""


@dataclass(frozen=True)
class Completed:
    """How a command ended: its exit status (124: it ran into its time limit), its
    stdout and stderr, and its wall time in seconds."""

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
    """Starts commands in sessions of their own and can stop them all."""

    # Of all runners: one of them appoints the warden.
    _guard = threading.Lock()

    def __init__(self) -> None:
        self.stopped = False
        self._family = f"{_family()}/{next(_NUMBERS)}"

    def marked(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` with the mark by which `stop` finds the process."""
        return {**env, FAMILY: self._family}

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
        child = self.start(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            stdout, stderr = child.communicate(timeout=timeout)
            returncode = child.returncode
        except subprocess.TimeoutExpired:
            kill_group(child.pid)
            stdout, stderr = child.communicate()
            stderr += f"\nkilled after {timeout:.0f} s: {shlex.join(command)}\n"
            returncode = TIMED_OUT
        finally:
            kill_group(child.pid)
        if self.stopped:
            raise Stopped
        return Completed(returncode, stdout, stderr, time.monotonic() - begin)

    def start(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start `command` and leave it to the caller; `stop` ends it as well.

        Args:
            options: what `subprocess.Popen` takes.

        Raises:
            Stopped: `stop` was called before.
            EnvironmentProblem: the program does not exist.
        """
        with self._guard:
            if self.stopped:
                raise Stopped
            _warden()
            try:
                return subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=self.marked(env),
                    text=True,
                    errors="replace",
                    start_new_session=True,
                    **options,
                )
            except FileNotFoundError as error:
                raise EnvironmentProblem(
                    f"cannot start {command[0]}",
                    detail=[str(error)],
                    again=in_tox,
                ) from error

    @contextlib.contextmanager
    def stop_on_error(self) -> Iterator[Self]:
        """Stop everything if the block ends with an exception, interrupts included."""
        try:
            yield self
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill all running processes, and refuse to start more."""
        with self._guard:
            self.stopped = True
        kill_family(self._family)


@cache
def _family() -> str:
    """The name of this process's family, inside that of a tool that started it."""
    return f"{os.environ.get(FAMILY, '')}/{secrets.token_hex(8)}"


@cache
def _warden() -> subprocess.Popen[bytes]:
    """The process that kills this one's family when this one ends."""
    program = warden.__file__
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", program, _family()],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(process.communicate)
    return process


def clean_environment(**extra: str) -> dict[str, str]:
    """An environment that does not depend on the user's settings: this interpreter's
    own programs first on PATH, no user site, one thread, fixed hash seed and locale.
    Of the caller's environment it keeps only the variables in `_KEPT`."""
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


def kill_group(leader: int) -> None:
    """Kill a process started here and its group; nothing where they have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def usable_cpus() -> int:
    """The CPUs that the scheduler may give this process, or fewer where a control
    group limits its time; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(math.floor(limit) for limit in _limits(_CGROUPS))]))


def _limits(root: Path, own: Path = Path("/proc/self/cgroup")) -> Iterator[float]:
    """How many CPUs' worth of time each control group (version 2) of this process
    allows. A container sees its own group as the root."""
    try:
        rows = own.read_text().splitlines()
    except OSError:
        return
    for row in rows:
        number, _, path = row.split(":", 2)
        if number == "0":
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                yield from _limit(folder / "cpu.max")
                if folder == root:
                    break


def _limit(file: Path) -> Iterator[float]:
    """The limit that a `cpu.max` sets: `<quota> <period>`, or `max <period>`."""
    try:
        quota, period = file.read_text().split()
        yield int(quota) / int(period)
    except (OSError, ValueError):
        return
