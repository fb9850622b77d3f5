# SPDX-License-Identifier: Apache-2.0
"""A server as an image starts it: by the files beside a wheel, in a PID namespace."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from proof.e2e.running.server import Server
from proof.e2e.running.serving import Engines

FILES = ("require_key.py", "serve.sh", "served.py")
"""What the images bring beside the wheel."""
NAMESPACE = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")


def lacking() -> str:
    """Why this machine cannot have containers; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "no program unshare or nsenter"
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    return tried.stderr.strip()


class Container(Server):
    """`serve.sh`, which is the first process of its namespace and becomes `vllm serve`.

    Args:
        key: is given as a flag, so no other process has it in its environment.
    """

    def __init__(self, engines: Engines, release: str, *flags: str, key: str) -> None:
        self.files = engines.work / "files"
        self.files.mkdir(exist_ok=True)
        for name in FILES:
            source = engines.project.root / "stack/release" / name
            shutil.copy(source, self.files)
        path = engines.environment(release, engines.work)["PATH"]
        super().__init__(
            engines,
            release,
            *("--api-key", key, *flags),
            key=key,
            environment={"PATH": f"{engines.work}:{path}"},
        )

    def words(self, script: Path, *command: str) -> list[str]:
        serve, *others = command
        assert serve == "serve", command
        return [*NAMESPACE, "sh", str(self.files / "serve.sh"), *others]

    @property
    def first(self) -> psutil.Process:
        """The first process of the namespace, `vllm serve`."""
        (process,) = psutil.Process(self.process.pid).children()
        return process

    def probe(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `served.py` in the container, as its health check does."""
        inside = ("nsenter", "--target", str(self.first.pid), "--pid", "--mount")
        return subprocess.run(
            [*inside, sys.executable, "-I", str(self.files / "served.py"), *words],
            env={},
            capture_output=True,
            text=True,
        )
