# SPDX-License-Identifier: Apache-2.0
"""The tool's side of the process that runs Python programs in forks of itself."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from stack.core.errors import CheckFailed, EnvironmentProblem, in_tox
from stack.core.process import Completed, Runner, Stopped, clean_environment
from stack.forks import program
from stack.forks.program import AHEAD_LIMIT, MESSAGE

START = 300.0
GRACE = 30.0
"""Seconds for the imports, and for an answer after a run's limit."""
KEPT = 4
"""Forks that wait with shared imports for another run."""
_SHOWN = 40


@dataclass(frozen=True)
class ProgramExit:
    """How a run ended: its exit status (negative: the signal that killed it), whether
    it was killed at its limit, and wall seconds."""

    status: int
    late: bool
    seconds: float


class Ahead(msgspec.Struct, frozen=True):
    """What runs on one path may share: modules to import in order, and the environment
    in which that happens."""

    modules: Sequence[str]
    env: Mapping[str, str]


class Server:
    """One process for many runs, which has imported `preloaded`; `start` or the first
    run starts it.

    Any number of threads may use it at the same time. `close`, `Runner.stop` and the
    end of the tool stop it.
    """

    def __init__(
        self,
        runner: Runner,
        preloaded: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`env` has the variables that the imports read, beside a clean environment."""
        self._runner = runner
        self._preloaded, self._env = preloaded, env or {}
        self._guard = threading.Lock()
        self._control, self._server_end = _socket_pair()
        self._child: subprocess.Popen[str] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._threads = 0
        self._imported: dict[bytes, Future[socket.socket | None]] = {}

    def start(self) -> None:
        """Start the process, unless that was done; the first run waits for its imports.

        Raises:
            Stopped: the runner was stopped.
        """
        with self._guard:
            self._started()

    def close(self) -> None:
        """End the process and, without a wait, the runs that are under way."""
        with self._guard:
            if self._child is not None:
                self._child.kill()
                self._child.wait()
            for each in (self._control, self._server_end, self._log):
                each.close()
            for imported in self._imported.values():
                imported.add_done_callback(_close)

    def run(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        path: Sequence[Path],
        env: Mapping[str, str],
        output: Path,
        limit: float,
        ahead: Ahead | None = None,
        reads: Path | None = None,
    ) -> ProgramExit:
        """Run a program as `python SCRIPT ARGUMENTS` would in a new process, or
        `python -m MODULE ARGUMENTS`.

        Args:
            words: the path of a script, ending in `.py`, or the name of a module; then
                its arguments.
            path: folders that precede this environment's own in `sys.path`.
            env: the run's whole environment.
            output: the file for what the run prints.
            limit: seconds after which the run and all its processes are killed.
            ahead: imports that the run may share with others of the same `path`. They
                happen once; if that fails, or is lost, the run starts without them.
            reads: the file that gets the paths of all files that the run opened, one on
                a line, and `ANY` if it started a process.

        Raises:
            EnvironmentProblem: no server or no process can be started, or the server
                ended.
            Stopped: the runner was stopped.
        """
        places = list(map(str, path))
        request = {
            "words": list(words),
            "cwd": str(cwd),
            "path": places,
            "env": self._runner.marked(env),
            "output": str(output),
        }
        if reads is not None:
            request["reads"] = str(reads)
        self._wait_for_imports()
        controls = [self._control]
        if ahead is not None:
            variables = self._runner.marked(ahead.env)
            imports = {"modules": ahead.modules, "path": places, "env": variables}
            if imported := self._with_imports(msgspec.json.encode(imports)):
                controls.insert(0, imported)
        for control in controls:
            begin = time.monotonic()
            answer, late = _ask(control, msgspec.json.encode(request), limit)
            if self._runner.stopped:
                raise Stopped
            if answer:
                return ProgramExit(int(answer), late, time.monotonic() - begin)
            if late:
                break
        raise self._problem()

    def complete(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        output: Path,
        limit: float,
    ) -> Completed:
        """As `run`, with what the program printed, as `Runner.run` returns it.

        Raises:
            CheckFailed: it was killed at its limit.
            EnvironmentProblem, Stopped: as `run`.
        """
        done = self.run(words, cwd=cwd, path=(), env=env, output=output, limit=limit)
        printed = output.read_text("utf-8", "replace") if output.is_file() else ""
        if done.late:
            raise CheckFailed(
                f"{Path(words[0]).name} did not end: it was killed after {limit:.0f} s",
                detail=printed.splitlines()[-_SHOWN:],
                again=in_tox,
            )
        return Completed(done.status, printed, "", done.seconds)

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None:
            descriptor = self._server_end.fileno()
            self._child = self._runner.start(
                [sys.executable, program.__file__, str(descriptor), *self._preloaded],
                cwd=Path("/"),
                env=clean_environment(**self._env),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor],
            )
            self._server_end.close()
        return self._child

    def _wait_for_imports(self) -> None:
        with self._guard:
            self._started()
            if not self._threads:
                self._control.settimeout(START)
                with contextlib.suppress(OSError):
                    self._threads = int(self._control.recv(MESSAGE) or 0)
        if self._threads != 1:
            if self._runner.stopped:
                raise Stopped
            raise self._problem()

    def _with_imports(self, request: bytes) -> socket.socket | None:
        """The control socket of a server that has made the imports; None if they
        fail."""
        with self._guard:
            known = self._imported.pop(request, None)
            # The last one in order is the last one in use.
            imported = self._imported[request] = known or Future()
            for oldest in list(self._imported)[:-KEPT]:
                self._imported.pop(oldest).add_done_callback(_close)
        if known is None:
            imported.set_result(self._import(request))
        return imported.result()

    def _import(self, request: bytes) -> socket.socket | None:
        with contextlib.suppress(OSError):
            control = _sent(self._control, request)
            control.settimeout(AHEAD_LIMIT + GRACE)
            with contextlib.suppress(OSError):
                if control.recv(MESSAGE) == b"1":
                    return control
            control.close()
        return None

    def _problem(self) -> EnvironmentProblem:
        """Why there is no server, or no answer of a run; with what the server says."""
        if self._threads > 1:
            how = f"has {self._threads} threads: it cannot fork"
        else:
            try:
                how = exit_text(self._started().wait(1))
            except subprocess.TimeoutExpired:
                how = "gave no answer"
        self._log.seek(0)
        return EnvironmentProblem(
            f"the fork server {how}",
            detail=self._log.read().decode(errors="replace").splitlines()[-_SHOWN:],
            hint="free -h; ulimit -u",
            again=in_tox,
        )


def exit_text(status: int) -> str:
    """How a process ended, as the predicate of a sentence."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-status}{name}"


def _ask(control: socket.socket, request: bytes, limit: float) -> tuple[bytes, bool]:
    """A server's answer to a request, which is empty if there is none; and whether the
    run was to be killed, after `limit` s."""
    late = False
    with contextlib.suppress(OSError), _sent(control, request) as answer:
        answer.settimeout(limit)
        try:
            return answer.recv(MESSAGE), late
        except TimeoutError:
            late = True
            answer.shutdown(socket.SHUT_WR)
            answer.settimeout(GRACE)
            return answer.recv(MESSAGE), late
    return b"", late


def _sent(control: socket.socket, request: bytes) -> socket.socket:
    """The socket for the answer to a request, which is sent to a server."""
    answer, server_end = _socket_pair()
    try:
        with server_end:
            socket.send_fds(control, [request], [server_end.fileno()])
    except OSError:
        answer.close()
        raise
    return answer


def _close(imported: Future[socket.socket | None]) -> None:
    if control := imported.result():
        control.close()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
