# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` of a patched release on the emulated XPU: its own CLI and processes."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import openai
import psutil

from proof.e2e.checkpoints.chat import THINK, THOUGHT, ChatWriter, StagedChatWriter
from proof.e2e.running.hosts import Host
from proof.e2e.running.serving import Engines
from stack.base.releases import load
from stack.core.process import Runner

MODEL = "tiny"
FLAGS = (
    *("--served-model-name", MODEL),
    *("--kv-cache-dtype", "fp8"),
    *("--block-size", "256"),
    *("--max-num-batched-tokens", "512"),
    *("--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
    "--enforce-eager",
    *("--reasoning-parser", "deepseek_v4"),
    *("--tool-call-parser", "deepseek_v4"),
    "--enable-auto-tool-choice",
    "--reasoning-config",
    f'{{"reasoning_start_str": "{THINK}", "reasoning_end_str": "{THOUGHT}"}}',
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
"""Those of docs/deploying.md, small sizes, a limit to thinking that requests may set,
and JSON without the white space that a random model would go on with."""
SCRIPT = """\
#!{python}
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""
"""`bin/vllm` as pip makes it of the wheel's entry point."""
ADDED = ("ray", "nixl", "vllm_router")
"""What only some tests need, where it is installed."""
READY = 600.0
"""Seconds until a server must answer."""


def checkpoint_of(engines: Engines, release: str, staged: bool = False) -> str:
    """The name of the checkpoint that can chat, as the release encodes a chat; one for
    pipeline stages if `staged`."""
    name = f"chat-{release}" + "-staged" * staged
    site = engines.installed(load(engines.project)[release], patched=True)
    engines.add_checkpoint(name, (StagedChatWriter if staged else ChatWriter)(site))
    return name


def open_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def server_environment(engines: Engines, release: str) -> dict[str, str]:
    """What the processes of a server see."""
    env = engines.environment(release, engines.work / f"served-{release}")
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
    env["VLLM_PLUGINS"] += ",e2e"
    env["PYTHONPATH"] += f":{packages()}"
    # A process's title leaves the variables alone by which it is found and ended.
    env["SPT_NOENV"] = "1"
    return env


class Program:
    """`vllm serve`: its processes on one host, and what they print.

    Ends all of them when a `with` block ends.

    Args:
        flags: those besides `FLAGS`.
        host: where it runs; this machine if None.
        staged: whether its checkpoint is one for pipeline stages.
        checkpoint: the name of another than the one that can chat.
        environment: variables besides an engine's.
    """

    def __init__(
        self,
        engines: Engines,
        release: str,
        *flags: str,
        host: Host | None = None,
        staged: bool = False,
        checkpoint: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.engines, self.release, self.host = engines, release, host
        self.environment = environment or {}
        name = checkpoint or checkpoint_of(engines, release, staged)
        self.model = engines.written(name)[0]
        self._runner = Runner()
        self._log = engines.work / f"server-{release}-{time.monotonic_ns()}.log"
        self.process = self.start(self._log, "serve", str(self.model), *FLAGS, *flags)

    def start(self, log: Path, *command: str) -> subprocess.Popen[str]:
        """Start `vllm` of this release with a command of its own."""
        script = self.engines.work / "vllm"
        script.write_text(SCRIPT.format(python=sys.executable))
        script.chmod(0o755)
        env = server_environment(self.engines, self.release)
        if self.host:
            env |= self.host.environment()
        return self._runner.start(
            self.words(script, *command),
            cwd=self.engines.work,
            env={**env, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def words(self, script: Path, *command: str) -> list[str]:
        """What starts `vllm`, the script, with a command."""
        words = [str(script), *command]
        return self.host.inside(*words) if self.host else words

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """The processes below the CLI's."""
        below: list[psutil.Process] = psutil.Process(self.process.pid).children(
            recursive=True
        )
        return below

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process."""
        self._runner.stop()
        self.process.wait()


class Server(Program):
    """A program that answers, and a client of it, which knows the server's key."""

    def __init__(
        self,
        engines: Engines,
        release: str,
        *flags: str,
        port: int = 0,
        key: str = "none",
        host: Host | None = None,
        staged: bool = False,
        checkpoint: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.key = key
        self.port = port or open_port()
        address = host.address if host else "127.0.0.1"
        self.url = f"http://{address}:{self.port}"
        own = ("--port", str(self.port))
        super().__init__(
            engines,
            release,
            *own,
            *flags,
            host=host,
            staged=staged,
            checkpoint=checkpoint,
            environment=environment,
        )
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=READY,
            # A server closes what is idle for five seconds, perhaps as it is used.
            default_headers={"Connection": "close"},
        )

    def wait(self) -> Self:
        """Wait until the server is healthy.

        Raises:
            RuntimeError: it ended, or was not ready in time.
        """
        limit = time.monotonic() + READY
        while self.process.poll() is None and time.monotonic() < limit:
            if self.get("/health") == 200:
                return self
            time.sleep(0.2)
        status = self.process.poll()
        self.stop()
        raise RuntimeError(f"the server is not ready; exit status {status}\n{self.log}")

    def get(self, path: str) -> int | None:
        """The status of an answer; None where nobody listens."""
        try:
            return self.send("GET", path)[0]
        except OSError:
            return None

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Status and text of an answer; asked with the key, or with other headers."""
        if headers is None:
            headers = {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", **headers},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=READY) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(errors="replace")

    def metrics(self) -> str:
        status, text = self.send("GET", "/metrics")
        assert status == 200, text
        return text

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.metrics().splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert found, f"/metrics has no {name}"
        return sum(float(line.rpartition(" ")[2]) for line in found)


def packages() -> str:
    """The folders with what the API server imports besides vLLM's other requirements,
    and with what is `ADDED`."""
    inside = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(os.environ.get("XPUSTACK_SERVE", ""), inside, "site-packages")
    if not folder.is_dir():
        raise RuntimeError("XPUSTACK_SERVE names no folder: `tox -e e2e` makes it")
    found = [importlib.util.find_spec(name) for name in ADDED]
    more = [Path(spec.origin).parents[1] for spec in found if spec and spec.origin]
    return ":".join(map(str, dict.fromkeys([folder, *more])))
