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
- `limit`: the seconds after which the run's whole session is killed.

The answer has `status` (negative: the signal), `late` (killed at the limit) and
`seconds`, or only `error` if no process could be started. Closing a run's socket kills
that run; closing the first socket kills all runs.
"""

import contextlib
import ctypes
import gc
import importlib
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
from typing import Any, NoReturn

MESSAGE = 1 << 17
_PR_SET_PDEATHSIG = 1
_CANNOT_START = 70


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


class ForkServer:
    """Takes requests, forks, and answers when a fork has ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._runs: dict[int, Fork] = {}
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
                        for run in self._runs.values():
                            run.kill()
                        return
                    self._begin(json.loads(message), socket.socket(fileno=sockets[0]))
                elif key.fileobj == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                elif isinstance(key.data, Fork):
                    # Its caller has gone.
                    key.data.kill()
            for run in list(self._runs.values()):
                if time.monotonic() > run.limit and not run.late:
                    run.late = True
                    run.kill()
                self._end(run)

    def _patience(self) -> float | None:
        limits = [run.limit for run in self._runs.values() if not run.late]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _begin(self, request: dict[str, Any], answer: socket.socket) -> None:
        begin = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            process = os.fork()
        except OSError as error:
            with answer, contextlib.suppress(OSError):
                answer.send(json.dumps({"error": str(error)}).encode())
            return
        if process == 0:
            try:
                self._detach(parent, answer)
                run_pytest(request, self._base)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(_CANNOT_START)
        run = Fork(process, answer, begin, begin + request["limit"])
        self._runs[process] = run
        self._selector.register(answer, selectors.EVENT_READ, run)

    def _detach(self, parent: int, answer: socket.socket) -> None:
        """In a fork: die with the server, and close the server's own descriptors."""
        os.setsid()
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_CANNOT_START)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for run in self._runs.values():
            run.answer.close()
        answer.close()
        self._control.close()
        os.close(self._wake)
        os.close(self._waking)
        # If memory runs out, the kernel kills the test rather than the tool.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
            f.write("900")

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


def run_pytest(request: dict[str, Any], base: list[str]) -> NoReturn:
    """Become what `python -m pytest` would be in a new process; exit without Python's
    own tear-down."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(null)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
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
    gc.collect()
    # A fork's garbage collections then neither walk nor copy these objects.
    gc.freeze()
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
