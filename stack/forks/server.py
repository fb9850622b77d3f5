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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TypeAlias

import msgspec

from stack.core.cache import Cache
from stack.core.errors import CheckFailed, EnvironmentProblem, in_tox
from stack.core.process import Completed, Runner, Stopped, clean_environment
from stack.forks import program
from stack.forks.program import AHEAD_LIMIT, MESSAGE, READY

START = 300.0
GRACE = 30.0
"""Seconds for the imports, and for an answer after a run's limit."""
KEPT = 4
"""Forks that wait with shared imports for another run."""
_SHOWN = 40


@dataclass(frozen=True)
class ProgramExit:
    """How a run ended: its exit status (negative: the signal that killed it), whether
    it was killed at its limit, and wall seconds.

    `died` says how the server itself ended if that happened twice during this run;
    `notes` say that it was started again.
    """

    status: int = 0
    late: bool = False
    seconds: float = 0.0
    died: str = ""
    notes: tuple[str, ...] = ()


class Ahead(msgspec.Struct, frozen=True):
    """What runs on one path may share: modules to import in order, and the environment
    in which that happens."""

    modules: Sequence[str]
    env: Mapping[str, str]


_Request: TypeAlias = Mapping[str, object]


class _Answer(msgspec.Struct):
    status: int = 0
    error: str = ""


class _ServerDied(Exception):
    """The server ended or does not answer; the argument says how."""


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
        self._process: _ServerProcess | None = None
        self._start: threading.Thread | None = None
        self._folders: dict[str, Path] = {}
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Start the process while the caller goes on; the first run waits for it, and
        meets what went wrong. Only one thread may call this."""

        def quietly() -> None:
            with contextlib.suppress(Exception):
                self._running()

        if self._start is None:
            start = threading.Thread(target=quietly)
            start.start()
            self._start = start

    def close(self) -> None:
        if self._start is not None:
            self._start.join()
        with self._guard:
            if self._process is not None:
                self._process.end()
            self._process = None
            self._folders.clear()
            self._stack.close()

    def folder(self, cache: Cache, name: str, fill: Callable[[Path], None]) -> Path:
        """A folder of files for many runs: `fill` writes it the first time that `name`
        is asked for, `close` removes it.

        Raises:
            EnvironmentProblem: the disk is full, or writing there is denied.
        """
        with self._guard:
            if name not in self._folders:
                folder = self._stack.enter_context(cache.scratch())
                fill(folder)
                self._folders[name] = folder
            return self._folders[name]

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

        If the server dies meanwhile, it is started again once: the cause may be
        another run.

        Args:
            words: the path of a script, ending in `.py`, or the name of a module; then
                its arguments.
            path: folders that precede this environment's own in `sys.path`.
            env: the run's whole environment.
            output: the file for what the run prints.
            limit: seconds after which the run and all its processes are killed.
            ahead: imports that the run may share with others of the same `path`. They
                happen once; if that fails, the run starts without them.
            reads: the file that gets the paths of all files that the run opened, one on
                a line, and `ANY` if it started a process.

        Raises:
            EnvironmentProblem: no server or no process can be started.
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
        imports: _Request | None = None
        if ahead is not None:
            variables = self._runner.marked(ahead.env)
            imports = {"modules": ahead.modules, "path": places, "env": variables}
        notes: list[str] = []
        for _ in range(2):
            process = self._running()
            try:
                with process.imported(imports) as control:
                    done = process.ask(control, request, limit)
            except _ServerDied as error:
                if self._runner.stopped:
                    raise Stopped from None
                self._forget(process)
                notes.append(f"the fork server {error} and was started again")
                continue
            if self._runner.stopped:
                raise Stopped
            return replace(done, notes=tuple(notes))
        return ProgramExit(died=notes[-1].removesuffix(" and was started again"))

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
            CheckFailed: it was killed at its limit, or the server died.
            EnvironmentProblem, Stopped: as `run`.
        """
        done = self.run(words, cwd=cwd, path=(), env=env, output=output, limit=limit)
        printed = output.read_text("utf-8", "replace") if output.is_file() else ""
        if done.late or done.died:
            how = f"it was killed after {limit:.0f} s" if done.late else done.died
            raise CheckFailed(
                f"{Path(words[0]).name} did not end: {how}",
                detail=printed.splitlines()[-_SHOWN:],
                again=in_tox,
            )
        return Completed(done.status, printed, "", done.seconds)

    def _running(self) -> "_ServerProcess":
        with self._guard:
            if self._process is None:
                self._process = _ServerProcess(self._runner, self._preloaded, self._env)
            return self._process

    def _forget(self, process: "_ServerProcess") -> None:
        with self._guard:
            process.end()
            if self._process is process:
                self._process = None


@dataclass(eq=False)
class _Imported:
    """A server in a fork of the first one, which has imported what runs share.
    `control` is None before that and where it failed."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    asked: bool = False
    control: socket.socket | None = None
    under_way: int = 0

    def end(self) -> None:
        """Close its socket and wait until it has killed its runs and closed its own."""
        if self.control is not None:
            with self.control, contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
                self.control.recv(MESSAGE)


class _ServerProcess:
    """The server's process, its control socket and its output."""

    def __init__(
        self, runner: Runner, preloaded: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self._control, server_end = _socket_pair()
        self._guard = threading.Lock()
        self._imported: dict[bytes, _Imported] = {}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with server_end:
            self._child = runner.start(
                [sys.executable, program.__file__, str(server_end.fileno())],
                cwd=Path("/"),
                env=clean_environment(**env),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[server_end.fileno()],
            )
        self._control.settimeout(START)
        try:
            self._control.send(msgspec.json.encode(preloaded))
            threads = msgspec.json.decode(self._control.recv(MESSAGE), type=int)
            problem = f"the fork server has {threads} threads: it cannot fork"
        except (OSError, msgspec.DecodeError):
            threads, problem = 0, "cannot start the fork server"
        if threads != 1:
            self.end()
            if runner.stopped:
                raise Stopped
            raise EnvironmentProblem(problem, detail=self._printed(), again=in_tox)

    @contextlib.contextmanager
    def imported(self, imports: _Request | None) -> Iterator[socket.socket]:
        """The control socket of a server that has made the imports; of the first one
        if there are none, or if they fail."""
        if imports is None:
            yield self._control
            return
        request = msgspec.json.encode(imports)
        with self._guard:
            # The last one in order is the last one in use.
            server = self._imported.pop(request, None) or _Imported()
            self._imported[request] = server
            server.under_way += 1
            idle = [key for key, one in self._imported.items() if not one.under_way]
            for key in idle[: max(0, len(self._imported) - KEPT)]:
                self._imported.pop(key).end()
        try:
            with server.guard:
                if not server.asked:
                    server.asked, server.control = True, self._import(request)
            yield server.control or self._control
        finally:
            with self._guard:
                server.under_way -= 1

    def _import(self, request: bytes) -> socket.socket | None:
        """Start a server that makes the imports; None if that fails."""
        own_end, server_end = _socket_pair()
        own_end.settimeout(AHEAD_LIMIT + GRACE)
        with contextlib.suppress(OSError):
            with server_end:
                socket.send_fds(self._control, [request], [server_end.fileno()])
            if own_end.recv(MESSAGE) == READY:
                return own_end
        own_end.close()
        return None

    def ask(
        self, control: socket.socket, request: _Request, limit: float
    ) -> ProgramExit:
        """Send a request to one of the servers and wait for the end of the run, which
        is killed after `limit` s.

        Raises:
            EnvironmentProblem: it cannot be started.
            _ServerDied: the server will not answer.
        """
        begin, late = time.monotonic(), False
        own_end, server_end = _socket_pair()
        with own_end:
            try:
                with server_end:
                    data = msgspec.json.encode(request)
                    socket.send_fds(control, [data], [server_end.fileno()])
                own_end.settimeout(limit)
                try:
                    data = own_end.recv(MESSAGE)
                except TimeoutError:
                    late = True
                    own_end.shutdown(socket.SHUT_WR)
                    own_end.settimeout(GRACE)
                    data = own_end.recv(MESSAGE)
            except TimeoutError:
                raise _ServerDied("did not answer") from None
            except OSError:
                data = b""
        if not data:
            raise _ServerDied(self._exit_text(control))
        answer = msgspec.json.decode(data, type=_Answer)
        if answer.error:
            raise EnvironmentProblem(
                "cannot fork a process",
                detail=[answer.error],
                hint="free -h; ulimit -u",
            )
        return ProgramExit(answer.status, late, time.monotonic() - begin)

    def end(self) -> None:
        """Close the sockets, which ends the servers and their runs. Kill the first one
        if it does not end."""
        for server in self._imported.values():
            server.end()
        self._control.close()
        try:
            self._child.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _exit_text(self, control: socket.socket) -> str:
        if control is not self._control:
            return "lost the process with its imports"
        try:
            return exit_text(self._child.wait(GRACE))
        except subprocess.TimeoutExpired:
            return "did not answer"

    def _printed(self) -> list[str]:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").splitlines()[-30:]


def exit_text(status: int) -> str:
    """How a process ended, as the predicate of a sentence."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-status}{name}"


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
