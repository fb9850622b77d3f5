# SPDX-License-Identifier: Apache-2.0
"""The tool's side of the process that runs pytest in forks of itself."""

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from xpustack.core.errors import EnvironmentProblem
from xpustack.core.process import Runner, Stopped, clean_environment
from xpustack.steptest import server_program
from xpustack.steptest.server_program import MESSAGE

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
}
"""What must be set before torch and the like are imported; each run has it too."""
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
"""What vLLM would spend a run's time on importing. One that is not installed, or
cannot be imported, is left to the runs, which then meet the same."""
START = 300.0
GRACE = 30.0
"""Seconds that importing may take, and an answer after the limit of a run."""


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended: its exit status (negative: the signal that killed
    it), whether it was killed at its limit, and wall seconds.

    `died` tells how the server itself ended if it did so twice under this run;
    `notes` say that it had to be started again.
    """

    status: int = 0
    late: bool = False
    seconds: float = 0.0
    died: str = ""
    notes: tuple[str, ...] = ()


class _Answer(msgspec.Struct):
    status: int = 0
    late: bool = False
    seconds: float = 0.0
    error: str = ""


class Ready(msgspec.Struct):
    """How importing ahead went: what could not be imported and why, the threads
    there are now, and wall seconds."""

    missing: list[str]
    threads: int
    seconds: float


class _Died(Exception):
    """The server ended, or does not answer; its argument says how."""


class Server:
    """One warm process for a whole run of checks, started by its first test.

    Any number of threads may ask it at the same time. It ends with `close`, with
    `Runner.stop`, and with the tool.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._guard = threading.Lock()
        self._process: _Process | None = None

    def close(self) -> None:
        with self._guard:
            if self._process is not None:
                self._process.end()
            self._process = None

    def ready(self) -> Ready:
        """Start the server, if it does not run, and say how that went."""
        return self._started().ready

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        path: Sequence[Path],
        env: Mapping[str, str],
        output: Path,
        limit: float,
    ) -> Ended:
        """Run pytest as `python -m pytest ARGUMENTS` would in a new process.

        A server that dies meanwhile, which is another test's doing as likely as this
        one's, is started again once.

        Args:
            path: folders that come before this environment's own.
            env: the run's whole environment.
            output: the file that gets what the run prints.
            limit: seconds after which the run is killed with all that it started.

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
        }
        notes: list[str] = []
        for _ in range(2):
            process = self._started()
            try:
                answer = process.ask(msgspec.json.encode(request), limit + GRACE)
            except _Died as error:
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
            return Ended(answer.status, answer.late, answer.seconds, notes=tuple(notes))
        return Ended(died=notes[-1].removesuffix(" and was started again"))

    def _started(self) -> "_Process":
        with self._guard:
            if self._process is None:
                self._process = _Process(self._runner)
            return self._process

    def _forget(self, process: "_Process") -> None:
        with self._guard:
            process.end()
            if self._process is process:
                self._process = None


class _Process:
    """The server's process, the socket to it and what it printed."""

    def __init__(self, runner: Runner) -> None:
        self._control, theirs = _socket_pair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._child = runner.start(
                [sys.executable, server_program.__file__, str(theirs.fileno())],
                cwd=Path("/"),
                env=clean_environment(**ENVIRONMENT),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._control.settimeout(START)
        try:
            self._control.send(msgspec.json.encode(PRELOADED))
            self.ready = msgspec.json.decode(self._control.recv(MESSAGE), type=Ready)
            threads = self.ready.threads
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

    def ask(self, request: bytes, patience: float) -> _Answer:
        """Send a request and wait for its answer.

        Raises:
            _Died: there will be none.
        """
        mine, theirs = _socket_pair()
        with mine:
            try:
                with theirs:
                    socket.send_fds(self._control, [request], [theirs.fileno()])
                mine.settimeout(patience)
                answer = mine.recv(MESSAGE)
            except TimeoutError:
                raise _Died("did not answer") from None
            except OSError:
                answer = b""
            if not answer:
                raise _Died(self._how())
            return msgspec.json.decode(answer, type=_Answer)

    def end(self) -> None:
        """Let it kill what it runs and end, and make sure that it does."""
        self._control.close()
        try:
            self._child.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _how(self) -> str:
        try:
            return described(self._child.wait(GRACE))
        except subprocess.TimeoutExpired:
            return "did not answer"

    def _printed(self) -> list[str]:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").splitlines()[-30:]


def described(status: int) -> str:
    """How a process ended, as the end of a sentence about it."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-status}{name}"


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
