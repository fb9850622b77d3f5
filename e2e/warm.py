# SPDX-License-Identifier: Apache-2.0
"""Processes of `engine.py` that have imported a tree's vLLM and fork for each job."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from xpustack.core.process import Runner

MOST = 3
"""How many wait for jobs at once; each holds about 600 MB."""
PAUSE = 0.1


@dataclass
class Ended:
    """A job that ended: its exit status, its output, and the seconds that it took."""

    status: int
    log: list[str]
    seconds: float


class Warm:
    """One tree's process."""

    def __init__(self, folder: Path, env: Mapping[str, str], log: Path) -> None:
        self._runner = Runner()
        self._log = log
        self.running = 0
        self.used = time.monotonic()
        self._process = self._runner.start(
            [sys.executable, "-m", "e2e.engine"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def run(self, order: Path, answer: Path, limit: float) -> Ended:
        """Run the job that `order` describes in a process of its own.

        Raises:
            RuntimeError: the tree's vLLM cannot be imported.
        """
        began = time.monotonic()
        log, status = order.with_suffix(".log"), order.with_suffix(".status")
        command = json.dumps([str(x) for x in (order, answer, log, status)])
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        while not status.is_file():
            time.sleep(PAUSE)
            took = time.monotonic() - began
            if self._process.poll() is not None and not status.is_file():
                whole = self._log.read_text(errors="replace")
                raise RuntimeError(f"{order.stem}: vLLM does not import\n{whole}")
            if took > limit:
                self.close()
                return Ended(-1, [f"killed after {took:.0f} s"], took)
        lines = log.read_text(errors="replace").splitlines()
        return Ended(int(status.read_text()), lines, time.monotonic() - began)

    def close(self) -> None:
        self._runner.stop()


class WarmUp:
    """The processes by tree: started when they are needed, the longest idle closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._guard = Lock()
        self._warm: dict[str, Warm] = {}

    def run(
        self, tree: str, env: Mapping[str, str], order: Path, answer: Path, limit: float
    ) -> Ended:
        """As `Warm.run`, in the process of `tree`."""
        with self._guard:
            if tree not in self._warm:
                self._make_room()
                log = self._folder.parent / f"{tree}.log"
                self._warm[tree] = Warm(self._folder, env, log)
            warm = self._warm[tree]
            warm.running += 1
        try:
            return warm.run(order, answer, limit)
        finally:
            with self._guard:
                warm.running -= 1
                warm.used = time.monotonic()

    def _make_room(self) -> None:
        idle = sorted(
            (warm.used, tree) for tree, warm in self._warm.items() if not warm.running
        )
        for _, tree in idle[: max(0, len(self._warm) + 1 - MOST)]:
            self._warm.pop(tree).close()

    def close(self) -> None:
        with self._guard:
            for warm in self._warm.values():
                warm.close()
            self._warm.clear()
