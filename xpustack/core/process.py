# SPDX-License-Identifier: Apache-2.0
"""Child processes that can be stopped together, with everything they started, and
that end with the tool, whatever ends it."""

import atexit
import contextlib
import itertools
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

from xpustack.core import warden
from xpustack.core.errors import EnvironmentProblem
from xpustack.core.warden import FAMILY, kill_family

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
_APPOINTING = threading.Lock()
_NUMBERS = itertools.count(1)


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
    """Starts commands in sessions of their own and can stop them all."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._stopped = False
        self._family = f"{_family()}/{next(_NUMBERS)}"

    @property
    def stopped(self) -> bool:
        return self._stopped

    def marked(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` as that of a process which `stop` ends."""
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
            _kill(child)
            stdout, stderr = child.communicate()
            stderr += f"\nkilled after {timeout:.0f} s: {shlex.join(command)}\n"
            returncode = TIMED_OUT
        finally:
            _kill(child)
        if self._stopped:
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
            if self._stopped:
                raise Stopped
            _appoint_warden()
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
                    hint="tox -e apply-and-test",
                ) from error

    @contextlib.contextmanager
    def stop_on_error(self) -> Iterator[Self]:
        """Stop everything if the block ends by an exception, be it an interrupt."""
        try:
            yield self
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill what runs, and refuse to start anything more."""
        with self._guard:
            self._stopped = True
        kill_family(self._family)


@cache
def _family() -> str:
    """The name of this process's family, inside that of a tool that started it."""
    return f"{os.environ.get(FAMILY, '')}/{secrets.token_hex(8)}"


def _appoint_warden() -> None:
    """Start the process that kills this one's family when this one ends."""
    with _APPOINTING:
        _warden()


@cache
def _warden() -> subprocess.Popen[bytes]:
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


def program(name: str) -> list[str]:
    """The command of a Python package's program, without a start of Python where
    it lies beside this one."""
    path = Path(sys.executable).parent / name
    return [str(path)] if path.is_file() else [sys.executable, "-m", name]


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
