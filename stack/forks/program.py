# SPDX-License-Identifier: Apache-2.0
"""Run Python programs in forks of a process that has imported what they have in common.

This file is a program of its own, started by `server`; it needs the standard library,
and the packages that it imports ahead. It imports nothing of vLLM, of a test or of this
repository: a fork learns about those only from its own request.

Its arguments are the file descriptor of a Unix socket that preserves message
boundaries, and the modules to import. It first says there how many threads it then has.
Each message from there is a request in JSON, and carries a socket for its answer:

- `env`: the whole environment of the run;
- `path`: folders that precede this process's own in `sys.path`;
- `words`: the name of a module or the path of a script, and its arguments;
- `cwd`; `output`: the file for what the run prints;
- `reads`: if it is there, the file that gets the paths of all files that the run and
  the imports before it opened, one on a line; `*` if it started another process, which
  may have opened any.

The answer is the run's exit status (negative: the signal), or an end without one if no
process could be started. Shutting a run's socket down kills that run; the end of this
process kills all.

A request with `modules` in place of `words` makes a server like this one, in a fork
that has imported them, for requests by the socket for its answer; that ends if it
cannot. Closing it ends this server, after its runs.
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
AHEAD_LIMIT = 60
"""Seconds for the imports of a server in a fork."""
ANY = "*"
_PR_SET_PDEATHSIG = 1
_STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.spawn"}

_opened: set[str] = set()
"""What this process opened, and those that it is a fork of."""


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: remember the files that are opened, and that a process starts."""
    if event == "open":
        if isinstance(arguments[0], str):
            _opened.add(arguments[0])
    elif event in _STARTS:
        _opened.add(ANY)


def preload(names: list[str]) -> None:
    """Import those modules that can be."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            # A run that needs it meets the same error.
            traceback.print_exc()


def keep() -> int:
    """Make forks of what was imported quick; return the number of threads."""
    # Importing modules that register operators asks for this once per process, and it
    # looks at all modules.
    inspect.getmodule(sys._getframe())
    # A fork's garbage collections then neither walk nor copy these objects, and are
    # rare: its imports make many objects that stay.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    return len(os.listdir("/proc/self/task"))


def serve(control: socket.socket, changes: dict[str, str]) -> NoReturn:
    """Fork for each request, until the other end of the control socket is closed and
    every fork has ended. Each run gets `changes` of its variables."""
    # The kernel forgets forks that have ended: nobody else asks for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, sockets, *_ = socket.recv_fds(control, MESSAGE, 1)
        if not message:
            with contextlib.suppress(ChildProcessError):
                os.wait()
            os._exit(0)
        with socket.socket(fileno=sockets[0]) as answer:
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                process = os.fork()
            except OSError:
                traceback.print_exc()
                continue
            if process == 0:
                control.close()
                try:
                    request = json.loads(message)
                    if "modules" in request:
                        serve_imported(request, answer)
                    guard(request, answer, changes)
                except BaseException:
                    traceback.print_exc()
                os._exit(1)


def serve_imported(request: dict[str, Any], control: socket.socket) -> None:
    """Import modules, then serve requests from `control`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(AHEAD_LIMIT)
    set_up(request["env"], request["path"])
    for name in request["modules"]:
        importlib.import_module(name)
    signal.alarm(0)
    control.send(b"%d" % keep())
    serve(control, dict(os.environ.items() - request["env"].items()))


def guard(
    request: dict[str, Any], answer: socket.socket, changes: dict[str, str]
) -> None:
    """Run a program in a fork of this process, and answer when it has ended. Kill it
    before that if its caller waits no longer, or if the server ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = os.pidfd_open(os.getppid())
    process = os.fork()
    if process == 0:
        answer.close()
        os.close(server)
        run_program(request, changes)
    ends = select.poll()
    ends.register(answer, select.POLLRDHUP)
    for descriptor in (os.pidfd_open(process), server):
        ends.register(descriptor, select.POLLIN)
    ended = [descriptor for descriptor, _ in ends.poll()]
    # The rest of its session, too, while the kernel cannot reuse the number.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    # A run whose server died proves nothing.
    if server not in ended:
        answer.send(b"%d" % os.waitstatus_to_exitcode(status))


def set_up(environment: dict[str, str], path: list[str]) -> None:
    """Give this process another environment, and further folders to import from."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = path
    importlib.invalidate_caches()
    tempfile.tempdir = None


def run_program(request: dict[str, Any], changes: dict[str, str]) -> NoReturn:
    """Become what `python SCRIPT` or `python -m MODULE` would be in a new process; exit
    without Python's own tear-down."""
    os.setsid()
    # If memory runs out, the kernel kills the run rather than the tool.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")
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
    set_up(request["env"] | changes, [home, *request["path"]])
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


def source_of(path: str) -> str:
    """The path of a module whose byte code stands at `path`; another path as it is."""
    if path.endswith(".pyc"):
        with contextlib.suppress(ValueError, NotImplementedError):
            return importlib.util.source_from_cache(path)
    return path


def main() -> None:
    sys.addaudithook(note)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # This program's folder: runs must not find xpustack.
    del sys.path[0]
    preload(sys.argv[2:])
    control.send(b"%d" % keep())
    serve(control, {})


if __name__ == "__main__":
    main()
