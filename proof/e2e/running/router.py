# SPDX-License-Identifier: Apache-2.0
"""vLLM's own router before servers that read and servers that answer."""

import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

from proof.e2e.running.server import READY, open_port, packages


def installed() -> bool:
    return importlib.util.find_spec("vllm_router") is not None


class Router:
    """Runs while a `with` block does.

    Args:
        words: those of `vllm-router`, without its own address.
        log: the file that gets what it prints.
    """

    def __init__(self, words: list[str], log: Path) -> None:
        port = open_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("w") as opened:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm_router.launch_router", *words),
                    *("--host", "127.0.0.1", "--port", str(port)),
                    *("--prometheus-port", str(open_port())),
                ],
                env={**os.environ, "PYTHONPATH": packages()},
                stdout=opened,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        limit = time.monotonic() + READY
        while time.monotonic() < limit and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=READY):
                    return self
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise RuntimeError(f"the router is not ready\n{self._log.read_text()}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
