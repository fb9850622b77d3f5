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
- `reads`: if it is there, the file that gets the paths of all files that the run and
  the imports before it opened, one on a line; `*` if it started another process, which
  may have opened any.

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
import importlib.util
import inspect
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

MESSAGE = 1 << 17
READY = b"ready"
AHEAD_LIMIT = 60
"""Seconds for the imports of a server in a fork."""
ANY = "*"
_STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.spawn"}
_PR_SET_PDEATHSIG = 1
_CANNOT_START = 70


_opened: set[str] = set()
"""What this process opened, and those that it is a fork of."""


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: remember the files that are opened, and that a process starts."""
    if event == "open":
        if isinstance(arguments[0], str):
            _opened.add(arguments[0])
    elif event in _STARTS:
        _opened.add(ANY)


def source_of(path: str) -> str:
    """The path of a module whose byte code stands at `path`; another path as it is."""
    if path.endswith(".pyc"):
        with contextlib.suppress(ValueError, NotImplementedError):
            return importlib.util.source_from_cache(path)
    return path


def serve(control: socket.socket, changes: dict[str, str] | None = None) -> None:
    """Fork for each request, until the other end of the control socket is closed and
    every fork has ended. `changes` are variables that an import has set: each run gets
    them."""
    # The kernel forgets forks that have ended: nobody else asks for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    base, own = list(sys.path), os.getpid()
    while True:
        message, sockets, *_ = socket.recv_fds(control, MESSAGE, 1)
        if not message:
            break
        request = json.loads(message)
        with socket.socket(fileno=sockets[0]) as answer:
            process = fork(answer)
            if process != 0:
                continue
            try:
                if "modules" in request:
                    die_with(own)
                    control.close()
                    serve_imported(request, answer)
                guard(request, control, answer, base, changes or {})
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(_CANNOT_START)
    with contextlib.suppress(ChildProcessError):
        os.wait()


def fork(answer: socket.socket) -> int:
    """As `os.fork`; -1 if no process could be started, which the answer then says."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return os.fork()
    except OSError as error:
        say(answer, error=str(error))
        return -1


def say(answer: socket.socket, **words: object) -> None:
    """Answer, unless nobody listens."""
    with contextlib.suppress(OSError):
        answer.send(json.dumps(words).encode())


def guard(
    request: dict[str, Any],
    control: socket.socket,
    answer: socket.socket,
    base: list[str],
    changes: dict[str, str],
) -> NoReturn:
    """Run a program in a fork of this process, and answer when it has ended. Kill it
    before that if its caller waits no longer, or if the server ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    own, server = os.getpid(), os.pidfd_open(os.getppid())
    process = fork(answer)
    if process == 0:
        die_with(own)
        os.setsid()
        for each in (control, answer):
            each.close()
        os.close(server)
        # If memory runs out, the kernel kills the run rather than the tool.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("900")
        run_program(request, base, changes)
    if process > 0:
        ends = select.poll()
        for descriptor in (os.pidfd_open(process), server):
            ends.register(descriptor, select.POLLIN)
        for each in (control, answer):
            ends.register(each, select.POLLRDHUP)
        ended = {descriptor for descriptor, _ in ends.poll()}
        # The rest of its session, too, while the kernel cannot reuse the number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
            os.killpg(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        # A run whose server died proves nothing.
        if server not in ended:
            say(answer, status=os.waitstatus_to_exitcode(status))
    os._exit(0)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(_CANNOT_START)


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
    serve(control, changes)
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
    # Forks of servers before this one are no processes of the run.
    _opened.discard(ANY)
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
    if "reads" in request:
        Path(request["reads"]).write_text("\n".join(sorted(map(source_of, _opened))))
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
    sys.addaudithook(note)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # This program's folder: runs must not find xpustack.
    del sys.path[0]
    threads = preload(json.loads(control.recv(MESSAGE)))
    control.send(json.dumps(threads).encode())
    serve(control)
    os._exit(0)


if __name__ == "__main__":
    main()
