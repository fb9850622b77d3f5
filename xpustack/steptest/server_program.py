# SPDX-License-Identifier: Apache-2.0
"""Run pytest in forks of a process that has already imported what vLLM imports.

This file is a program of its own, started by `server`; it needs the standard
library, pytest, and the packages that it imports ahead. It imports nothing of vLLM,
of a test or of this repository: a fork learns about those only from its own request.

Its argument is the file descriptor of a Unix socket that preserves message
boundaries. Each message is JSON. The first one lists the modules to import ahead; the
answer says how that went. Each further message is a request and carries a socket for
its answer:

- `cwd`, `env`: the folder and the whole environment of the run;
- `path`: folders that precede this process's own in `sys.path`;
- `arguments`: pytest's own; `output`: the file for what it prints;
- `limit`: the seconds after which the run's whole session is killed;
- `ahead`, or None: `modules` and `env`. A process with that path and that environment
  imports the modules once and serves all requests that ask for the same; if the import
  fails, ends the process or does not end, each request is served without it.

The answer has `status` (negative: the signal), `late` (killed at the limit) and
`seconds`, or only `error` if no process could be started. Closing a run's socket kills
that run; closing the first socket kills all runs.
"""

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MESSAGE = 1 << 17
AHEAD_LIMIT = 60
"""Seconds for the imports that several runs share."""
KEPT = 4
"""Processes that wait with such imports for another run."""
_PR_SET_PDEATHSIG = 1
_CANNOT_START = 70
_READY, _ENDED = b"ready", b"ended"


@dataclass
class Fork:
    """A running fork: its process and session, and when its time is up."""

    process: int
    answer: socket.socket
    begin: float
    limit: float
    late: bool = False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process, signal.SIGKILL)
            os.killpg(self.process, signal.SIGKILL)


@dataclass
class Importer:
    """A fork that imports what several runs need and then serves them itself.

    Until it is `ready`, their requests wait; `under_way` counts those that it got.
    """

    process: int
    control: socket.socket
    waiting: list[tuple[dict[str, Any], socket.socket]]
    ready: bool = False
    under_way: int = 0


class ForkServer:
    """Takes requests, forks, and answers when a fork has ended."""

    def __init__(
        self, control: socket.socket, changes: dict[str, str] | None = None
    ) -> None:
        """`changes` are variables that an import has set: each run gets them. Only a
        server that has them says to its control socket when a run has ended."""
        self._control = control
        self._changes = changes
        self._runs: dict[int, Fork] = {}
        self._importers: dict[str, Importer] = {}
        self._base = list(sys.path)
        self._libc = ctypes.CDLL(None)
        self._wake, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Work until the other end of the control socket is closed."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._control:
                    message, sockets, *_ = socket.recv_fds(self._control, MESSAGE, 1)
                    if not message:
                        self._close()
                        return
                    self._take(json.loads(message), socket.socket(fileno=sockets[0]))
                elif key.fileobj == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                elif isinstance(key.data, Fork):
                    # Its caller has gone.
                    key.data.kill()
                elif isinstance(key.data, str):
                    self._hear(key.data)
            for run in list(self._runs.values()):
                if time.monotonic() > run.limit and not run.late:
                    run.late = True
                    run.kill()
                self._end(run)

    def _patience(self) -> float | None:
        limits = [run.limit for run in self._runs.values() if not run.late]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _close(self) -> None:
        """Kill all runs, those of the importers as well."""
        for run in self._runs.values():
            run.kill()
        for importer in self._importers.values():
            if not importer.ready:
                os.kill(importer.process, signal.SIGKILL)
            importer.control.close()
        for importer in self._importers.values():
            os.waitpid(importer.process, 0)

    def _take(self, request: dict[str, Any], answer: socket.socket) -> None:
        """Begin a run, or give it to the process that has imported what it needs."""
        ahead = request["ahead"]
        if ahead is None or self._changes is not None:
            self._begin(request, answer)
            return
        key = json.dumps([request["path"], ahead])
        if key not in self._importers:
            self._make_room()
            importer = self._import(request["path"], ahead, answer)
            if importer is None:
                self._begin(request, answer)
                return
            self._importers[key] = importer
            self._selector.register(importer.control, selectors.EVENT_READ, key)
        # The last one in order is the last one in use.
        importer = self._importers[key] = self._importers.pop(key)
        importer.waiting.append((request, answer))
        self._give(importer)

    def _give(self, importer: Importer) -> None:
        while importer.ready and importer.waiting:
            request, answer = importer.waiting.pop(0)
            importer.under_way += 1
            with answer, contextlib.suppress(OSError):
                message = json.dumps(request).encode()
                socket.send_fds(importer.control, [message], [answer.fileno()])

    def _hear(self, key: str) -> None:
        """An importer is ready, has ended a run, or has gone."""
        importer = self._importers[key]
        try:
            message = importer.control.recv(MESSAGE)
        except ConnectionResetError:  # it was killed with a request unread
            message = b""
        if message == _READY:
            importer.ready = True
            self._give(importer)
        elif message == _ENDED:
            importer.under_way -= 1
        else:
            self._forget(key)
            for request, answer in importer.waiting:
                self._begin(request, answer)

    def _forget(self, key: str) -> None:
        importer = self._importers.pop(key)
        self._selector.unregister(importer.control)
        importer.control.close()
        os.waitpid(importer.process, 0)

    def _make_room(self) -> None:
        idle = [
            key
            for key, importer in self._importers.items()
            if importer.ready and not importer.under_way
        ]
        for key in idle[: max(0, len(self._importers) - KEPT + 1)]:
            self._forget(key)

    def _import(
        self, path: list[str], ahead: dict[str, Any], answer: socket.socket
    ) -> Importer | None:
        """Fork a process that imports ahead; None if none can be forked."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = self._fork()
        if isinstance(process, OSError):
            own.close()
            other.close()
            return None
        if process == 0:
            try:
                own.close()
                answer.close()
                self._detach()
                serve_imported(path, ahead, other)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(_CANNOT_START)
        other.close()
        return Importer(process, own, [])

    def _begin(self, request: dict[str, Any], answer: socket.socket) -> None:
        begin = time.monotonic()
        process = self._fork()
        if isinstance(process, OSError):
            with answer, contextlib.suppress(OSError):
                answer.send(json.dumps({"error": str(process)}).encode())
            return
        if process == 0:
            try:
                os.setsid()
                answer.close()
                self._detach()
                # If memory runs out, the kernel kills the test rather than the tool.
                with contextlib.suppress(OSError):
                    Path("/proc/self/oom_score_adj").write_text("900")
                run_pytest(request, self._base, self._changes or {})
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(_CANNOT_START)
        run = Fork(process, answer, begin, begin + request["limit"])
        self._runs[process] = run
        self._selector.register(answer, selectors.EVENT_READ, run)

    def _fork(self) -> int | OSError:
        """As `os.fork`; the new process dies with this one."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            process = os.fork()
        except OSError as error:
            return error
        if process == 0:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(_CANNOT_START)
        return process

    def _detach(self) -> None:
        """In a fork: close the server's own descriptors."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for run in self._runs.values():
            run.answer.close()
        for importer in self._importers.values():
            importer.control.close()
            for _, answer in importer.waiting:
                answer.close()
        self._control.close()
        os.close(self._wake)
        os.close(self._waking)

    def _end(self, run: Fork) -> None:
        """Answer if the run has ended. First kill the rest of its session, while
        the kernel cannot yet reuse the process number."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, run.process, options) is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(run.process, signal.SIGKILL)
        _, status = os.waitpid(run.process, 0)
        del self._runs[run.process]
        self._selector.unregister(run.answer)
        answer = {
            "status": os.waitstatus_to_exitcode(status),
            "late": run.late,
            "seconds": time.monotonic() - run.begin,
        }
        with run.answer, contextlib.suppress(OSError):
            run.answer.send(json.dumps(answer).encode())
        if self._changes is not None:
            self._control.send(_ENDED)


def serve_imported(
    path: list[str], ahead: dict[str, Any], control: socket.socket
) -> NoReturn:
    """Import the modules, then serve requests from `control`."""
    signal.alarm(AHEAD_LIMIT)
    os.environ.clear()
    os.environ.update(ahead["env"])
    sys.path[:0] = path
    importlib.invalidate_caches()
    tempfile.tempdir = None
    for name in ahead["modules"]:
        importlib.import_module(name)
    signal.alarm(0)
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(_CANNOT_START)
    gc.collect()
    gc.freeze()
    changes = {
        name: value
        for name, value in os.environ.items()
        if ahead["env"].get(name) != value
    }
    control.send(_READY)
    ForkServer(control, changes).serve()
    os._exit(0)


def run_pytest(
    request: dict[str, Any], base: list[str], changes: dict[str, str]
) -> NoReturn:
    """Become what `python -m pytest` would be in a new process, with `changes` of its
    variables; exit without Python's own tear-down."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(null)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"] | changes)
    sys.path[:] = [request["cwd"], *request["path"], *base]
    main = importlib.import_module("pytest.__main__")
    sys.modules["__main__"] = main
    sys.argv = [str(main.__file__), *request["arguments"]]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    # A new process has new random states; in a fork only `random` reseeds itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    pytest = importlib.import_module("pytest")
    status = int(pytest.main(request["arguments"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def preload(names: list[str]) -> dict[str, Any]:
    """Import the modules; return the failures and the number of threads afterwards."""
    begin = time.monotonic()
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    # Importing modules that register operators asks for this once per process, and it
    # looks at all modules.
    inspect.getmodule(sys._getframe())
    # A fork's garbage collections then neither walk nor copy these objects, and are
    # rare: its imports make many objects that stay.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    return {
        "missing": missing,
        "threads": len(os.listdir("/proc/self/task")),
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # This program's folder: tests must not find xpustack.
    del sys.path[0]
    report = preload(json.loads(control.recv(MESSAGE)))
    control.send(json.dumps(report).encode())
    ForkServer(control).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
