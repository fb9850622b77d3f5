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
- `cwd`; `output`: the file for what the run prints.

The answer has `status` (negative: the signal), or only `error` if no process could be
started. Shutting a run's socket down, or closing it, kills that run; closing the first
socket kills all runs.

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
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
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


@dataclass(frozen=True)
class Fork:
    """A running fork: its process and session, and a descriptor that tells its end. A
    server in a fork has no `answer`: it ends when its own socket is closed."""

    process: int
    end: int
    answer: socket.socket | None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process, signal.SIGKILL)
            os.killpg(self.process, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.end)
        if self.answer is not None:
            self.answer.close()


class ForkServer:
    """Takes requests, forks, and answers when a fork has ended."""

    def __init__(
        self, control: socket.socket, changes: dict[str, str] | None = None
    ) -> None:
        """`changes` are variables that an import has set: each run gets them."""
        self._control = control
        self._changes = changes or {}
        self._forks: set[Fork] = set()
        self._base = list(sys.path)
        self._libc = ctypes.CDLL(None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Work until the other end of the control socket is closed."""
        while True:
            for key, _ in self._selector.select():
                fork: Fork = key.data
                if key.fileobj is self._control:
                    message, sockets, *_ = socket.recv_fds(self._control, MESSAGE, 1)
                    if not message:
                        for fork in self._forks:
                            fork.kill()
                        return
                    self._begin(json.loads(message), socket.socket(fileno=sockets[0]))
                elif key.fileobj == fork.end:
                    self._end(fork)
                elif fork in self._forks and fork.answer is not None:
                    # Its caller has gone, or waits no longer.
                    self._selector.unregister(fork.answer)
                    fork.kill()

    def _begin(self, request: dict[str, Any], answer: socket.socket) -> None:
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
        end = os.pidfd_open(process)
        if "modules" in request:
            answer.close()
            fork = Fork(process, end, None)
        else:
            fork = Fork(process, end, answer)
            self._selector.register(answer, selectors.EVENT_READ, fork)
        self._selector.register(end, selectors.EVENT_READ, fork)
        self._forks.add(fork)

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
        self._selector.close()
        for fork in self._forks:
            fork.close()
        self._control.close()

    def _end(self, fork: Fork) -> None:
        """Answer for a fork that has ended. First kill the rest of its session, while
        the kernel cannot yet reuse the process number."""
        fork.kill()
        _, status = os.waitpid(fork.process, 0)
        self._forks.remove(fork)
        self._selector.unregister(fork.end)
        if fork.answer is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fork.answer)
            with contextlib.suppress(OSError):
                answer = {"status": os.waitstatus_to_exitcode(status)}
                fork.answer.send(json.dumps(answer).encode())
        fork.close()


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
