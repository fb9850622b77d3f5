# SPDX-License-Identifier: Apache-2.0
"""The tool's side of the process that runs pytest in forks of itself."""

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from xpustack.core.cache import Cache
from xpustack.core.errors import EnvironmentProblem
from xpustack.core.process import Runner, Stopped, clean_environment
from xpustack.steptest import server_program
from xpustack.steptest.server_program import AHEAD_LIMIT, MESSAGE

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
}
"""Variables that torch and the like read on import; each run has them too."""
PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch.utils.cpp_extension",
    "triton",
    "triton.language",
    "triton.experimental.gluon",
    "triton.runtime.interpreter",
    "transformers",
    "transformers.modeling_utils",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.whisper.tokenization_whisper",
    "transformers.video_processing_utils",
    "pytest",
    "_pytest.debugging",
    "_pytest.junitxml",
    "aiohttp",
    "cbor2",
    "cpuinfo",
    "einops",
    "fastapi",
    "llguidance",
    "msgspec",
    "openai",
    "openai.types.responses",
    "openai_harmony",
    "partial_json_parser",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pydantic.dataclasses",
    "regex",
    "requests",
    "safetensors.torch",
    "uvloop",
    "xgrammar",
    "zmq",
)
"""Modules that vLLM would import in each run. If one cannot be imported here, the
runs meet the same error themselves."""
START = 300.0
GRACE = 30.0
"""Seconds for the imports, and for an answer after a run's limit."""


@dataclass(frozen=True)
class PytestExit:
    """How a run of pytest ended: its exit status (negative: the signal that killed
    it), whether it was killed at its limit, and wall seconds.

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


class _RunAnswer(msgspec.Struct):
    status: int = 0
    late: bool = False
    seconds: float = 0.0
    error: str = ""


class PreloadReport(msgspec.Struct):
    """The modules that could not be imported ahead and why, the number of threads
    afterwards, and wall seconds."""

    missing: list[str]
    threads: int
    seconds: float


class _ServerDied(Exception):
    """The server ended or does not answer; the argument says how."""


class Server:
    """One warm process for a whole run of checks; the first test starts it.

    Any number of threads may use it at the same time. `close`, `Runner.stop` and the
    end of the tool stop it.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._guard = threading.Lock()
        self._process: _ServerProcess | None = None
        self._folders: dict[str, Path] = {}
        self._stack = ExitStack()

    def close(self) -> None:
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

    def start(self) -> PreloadReport:
        """Start the server if it does not run; report its imports."""
        return self._running().preload

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        path: Sequence[Path],
        env: Mapping[str, str],
        output: Path,
        limit: float,
        ahead: Ahead | None = None,
    ) -> PytestExit:
        """Run pytest as `python -m pytest ARGUMENTS` would in a new process.

        If the server dies meanwhile, it is started again once: the cause may be
        another test.

        Args:
            path: folders that precede this environment's own in `sys.path`.
            env: the run's whole environment.
            output: the file for what the run prints.
            limit: seconds after which the run and all its processes are killed.
            ahead: imports that the run may share with others of the same `path`. They
                happen once; if that fails, the run starts without them.

        Raises:
            EnvironmentProblem: no server or no process can be started.
            Stopped: the runner was stopped.
        """
        request = {
            "arguments": list(arguments),
            "cwd": str(cwd),
            "path": list(map(str, path)),
            "env": self._runner.marked(env),
            "output": str(output),
            "limit": limit,
            "ahead": ahead and Ahead(ahead.modules, self._runner.marked(ahead.env)),
        }
        patience = limit + GRACE + (AHEAD_LIMIT if ahead else 0.0)
        notes: list[str] = []
        for _ in range(2):
            process = self._running()
            try:
                answer = process.ask(msgspec.json.encode(request), patience)
            except _ServerDied as error:
                if self._runner.stopped:
                    raise Stopped from None
                self._forget(process)
                notes.append(f"the test server {error} and was started again")
                continue
            if answer.error:
                raise EnvironmentProblem(
                    "cannot start a process for a test",
                    detail=[answer.error],
                    hint="free -h; ulimit -u",
                )
            return PytestExit(
                answer.status, answer.late, answer.seconds, notes=tuple(notes)
            )
        return PytestExit(died=notes[-1].removesuffix(" and was started again"))

    def _running(self) -> "_ServerProcess":
        with self._guard:
            if self._process is None:
                self._process = _ServerProcess(self._runner)
            return self._process

    def _forget(self, process: "_ServerProcess") -> None:
        with self._guard:
            process.end()
            if self._process is process:
                self._process = None


class _ServerProcess:
    """The server's process, its control socket and its output."""

    def __init__(self, runner: Runner) -> None:
        self._control, server_end = _socket_pair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with server_end:
            self._child = runner.start(
                [sys.executable, server_program.__file__, str(server_end.fileno())],
                cwd=Path("/"),
                env=clean_environment(**ENVIRONMENT),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[server_end.fileno()],
            )
        self._control.settimeout(START)
        try:
            self._control.send(msgspec.json.encode(PRELOADED))
            self.preload = msgspec.json.decode(
                self._control.recv(MESSAGE), type=PreloadReport
            )
            threads = self.preload.threads
            problem = f"the test server has {threads} threads: it cannot fork"
        except (OSError, msgspec.DecodeError):
            threads, problem = 0, "cannot start the test server"
        if threads != 1:
            self.end()
            if runner.stopped:
                raise Stopped
            raise EnvironmentProblem(
                problem, detail=self._printed(), hint="tox -e apply-and-test"
            )

    def ask(self, request: bytes, patience: float) -> _RunAnswer:
        """Send a request and wait for its answer.

        Raises:
            _ServerDied: the server will not answer.
        """
        own_end, server_end = _socket_pair()
        with own_end:
            try:
                with server_end:
                    socket.send_fds(self._control, [request], [server_end.fileno()])
                own_end.settimeout(patience)
                answer = own_end.recv(MESSAGE)
            except TimeoutError:
                raise _ServerDied("did not answer") from None
            except OSError:
                answer = b""
            if not answer:
                raise _ServerDied(self._exit_text())
            return msgspec.json.decode(answer, type=_RunAnswer)

    def end(self) -> None:
        """Close the socket, which ends the server and its runs. Kill it if it does not
        end."""
        self._control.close()
        try:
            self._child.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _exit_text(self) -> str:
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
