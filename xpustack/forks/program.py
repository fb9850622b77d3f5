# SPDX-License-Identifier: Apache-2.0
"""Run Python programs in forks of a process that has imported what they have in common.

This file is a program of its own, started by `server`; it needs the standard
library, and the packages that it imports ahead. It imports nothing of vLLM, of a test
or of this repository: a fork learns about those only from its own request.

Its argument is the file descriptor of a Unix socket that preserves message
boundaries. Each message is JSON. The first one lists the modules to import ahead; the
answer is the number of threads afterwards. Each further message is a request and
carries a socket for its answer:

- `env`: the whole environment of the run;
- `path`: folders that precede this process's own in `sys.path`;
- `words`: the name of a module or the path of a script, and its arguments;
- `cwd`; `output`: the file for what the run prints;
- `limit`: the seconds after which the run's whole session is killed.

The answer has `status` (negative: the signal), `late` (killed at the limit) and
`seconds`, or only `error` if no process could be started. Closing a run's socket kills
that run; closing the first socket kills all runs.

A request with `modules` in place of `words` makes a server like this one, in a fork
that has imported them: it says `READY` to the socket for its answer, and takes requests
from there. If that fails, the socket is closed.
"""

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import math
import os
import runpy
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
READY = b"ready"
AHEAD_LIMIT = 60
"""Seconds for the imports of a server in a fork."""
_PR_SET_PDEATHSIG = 1
_CANNOT_START = 70


@dataclass
class Fork:
    """A running fork: its process and session, and when its time is up. A server in a
    fork has no `answer`: it ends when its own socket is closed."""

    process: int
    answer: socket.socket | None
    begin: float
    limit: float
    late: bool = False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process, signal.SIGKILL)
            os.killpg(self.process, signal.SIGKILL)


class ForkServer:
    """Takes requests, forks, and answers when a fork has ended."""

    def __init__(
        self, control: socket.socket, changes: dict[str, str] | None = None
    ) -> None:
        """`changes` are variables that an import has set: each run gets them."""
        self._control = control
        self._changes = changes or {}
        self._forks: dict[int, Fork] = {}
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
                        for fork in self._forks.values():
                            fork.kill()
                        return
                    self._begin(json.loads(message), socket.socket(fileno=sockets[0]))
                elif key.fileobj == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                else:
                    # Its caller has gone.
                    key.data.kill()
            for fork in list(self._forks.values()):
                if time.monotonic() > fork.limit and not fork.late:
                    fork.late = True
                    fork.kill()
                self._end(fork)

    def _patience(self) -> float | None:
        limits = [fork.limit for fork in self._forks.values() if not fork.late]
        nearest = min(limits, default=math.inf)
        return None if nearest == math.inf else max(0.0, nearest - time.monotonic())

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
                self._detach()
                if "modules" in request:
                    serve_imported(request, answer)
                answer.close()
                # If memory runs out, the kernel kills the run rather than the tool.
                with contextlib.suppress(OSError):
                    Path("/proc/self/oom_score_adj").write_text("900")
                run_program(request, self._base, self._changes)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(_CANNOT_START)
        if "modules" in request:
            answer.close()
            self._forks[process] = Fork(process, None, begin, math.inf)
            return
        fork = Fork(process, answer, begin, begin + request["limit"])
        self._forks[process] = fork
        self._selector.register(answer, selectors.EVENT_READ, fork)

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
        for fork in self._forks.values():
            if fork.answer is not None:
                fork.answer.close()
        self._control.close()
        os.close(self._wake)
        os.close(self._waking)

    def _end(self, fork: Fork) -> None:
        """Answer if the fork has ended. First kill the rest of its session, while
        the kernel cannot yet reuse the process number."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, fork.process, options) is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(fork.process, signal.SIGKILL)
        _, status = os.waitpid(fork.process, 0)
        del self._forks[fork.process]
        if fork.answer is None:
            return
        self._selector.unregister(fork.answer)
        answer = {
            "status": os.waitstatus_to_exitcode(status),
            "late": fork.late,
            "seconds": time.monotonic() - fork.begin,
        }
        with fork.answer, contextlib.suppress(OSError):
            fork.answer.send(json.dumps(answer).encode())


def serve_imported(request: dict[str, Any], control: socket.socket) -> NoReturn:
    """Import modules, then serve requests from `control`."""
    signal.alarm(AHEAD_LIMIT)
    environment = request["env"]
    set_up(environment, request["path"] + sys.path)
    for name in request["modules"]:
        importlib.import_module(name)
    signal.alarm(0)
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(_CANNOT_START)
    gc.collect()
    gc.freeze()
    changes = {
        name: value
        for name, value in os.environ.items()
        if environment.get(name) != value
    }
    control.send(READY)
    ForkServer(control, changes).serve()
    os._exit(0)


def run_program(
    request: dict[str, Any], base: list[str], changes: dict[str, str]
) -> NoReturn:
    """Become what `python SCRIPT` or `python -m MODULE` would be in a new process, with
    `changes` of its variables; exit without Python's own tear-down."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(null)
    os.chdir(request["cwd"])
    program, *_ = sys.argv = request["words"]
    script = program.endswith(".py")
    home = os.path.dirname(os.path.abspath(program)) if script else request["cwd"]
    set_up(request["env"] | changes, [home, *request["path"], *base])
    # A new process has new random states; in a fork only `random` reseeds itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    status = 0
    try:
        if script:
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def set_up(environment: dict[str, str], path: list[str]) -> None:
    """Give this process another environment and search path."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    importlib.invalidate_caches()
    tempfile.tempdir = None


def preload(names: list[str]) -> int:
    """Import those modules that can be; return the number of threads afterwards."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            # A run that needs it meets the same error.
            traceback.print_exc()
    # Importing modules that register operators asks for this once per process, and it
    # looks at all modules.
    inspect.getmodule(sys._getframe())
    # A fork's garbage collections then neither walk nor copy these objects, and are
    # rare: its imports make many objects that stay.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # This program's folder: runs must not find xpustack.
    del sys.path[0]
    threads = preload(json.loads(control.recv(MESSAGE)))
    control.send(json.dumps(threads).encode())
    ForkServer(control).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
