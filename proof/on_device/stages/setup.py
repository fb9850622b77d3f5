# SPDX-License-Identifier: Apache-2.0
"""What a stage gets, the device, its Python and a folder, and what a stage gives.

A driver that hangs can leave a process that cannot be killed. The stage ends without
it, and its result says so.
"""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof.on_device.stages.records import Finding, Kind, StageResult, Status
from stack.base.releases import Release
from stack.core.process import TIMED_OUT, Runner, kill_group
from stack.core.progress import Progress
from stack.core.project import Project

GRACE = 10.0
"""Seconds that a killed process has to go."""
EVERY = 5.0
"""Seconds between two lines of progress."""
LAST_LINES = 15
"""Lines of the log that a crashed program's outcome has."""


@dataclass(frozen=True)
class Outcome:
    """A stage's result, as far as the stage knows it."""

    status: Status
    summary: str
    findings: tuple[Finding, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)

    def result(self, stage: str, key: str, seconds: float) -> StageResult:
        return StageResult(
            stage,
            self.status,
            key,
            round(seconds, 1),
            self.summary,
            self.findings,
            self.data,
        )


@dataclass(frozen=True)
class Ended:
    """How a program of a stage ended.

    Attributes:
        returncode: its exit status; 124 after its time limit.
        stuck: it did not even end when it was killed.
    """

    stage: str
    log: Path
    returncode: int
    seconds: float
    stuck: bool = False

    @property
    def timed_out(self) -> bool:
        return self.returncode == TIMED_OUT

    def failed(self, what: str, data: dict[str, Any] | None = None) -> Outcome:
        """The outcome of a program, `what`, that hung or ended without a result."""
        if not self.timed_out:
            return Outcome(
                "failed",
                f"{what} ended with exit status {self.returncode}",
                tuple(Finding(line) for line in self._last_lines() if line.strip()),
                data or {},
            )
        left = ", and its process cannot be ended: the driver hangs"
        last = "".join(self._last_lines()[-1:])
        return Outcome(
            "failed",
            f"{what}: did not end within {self.seconds:.0f} s{left * self.stuck}",
            (
                Finding(
                    f"last line: {last}",
                    "sudo dmesg | tail -n 50; then run again, with more --minutes",
                ),
            ),
            data or {},
        )

    def _last_lines(self) -> list[str]:
        text = self.log.read_text("utf-8", "replace")
        return text.rstrip().splitlines()[-LAST_LINES:]


@dataclass
class Setup:
    """The device, the Python and the folder of a run of stages.

    Attributes:
        python: the interpreter with torch for the device.
        out: the folder of all results.
        minutes: about how long a stage may take at most.
        model: the folder of a checkpoint for the stage `model`.
        probe: what the doctor's probe wrote.
    """

    project: Project
    kind: Kind
    release: Release
    python: str
    out: Path
    minutes: float
    runner: Runner
    progress: Progress
    probe: dict[str, Any] = field(default_factory=dict)
    model: Path | None = None

    def folder(self, stage: str) -> Path:
        folder = self.out / stage
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def device(self) -> dict[str, Any]:
        """What the probe found of the device; empty where there is none."""
        return self.probe.get("device") or {}

    @property
    def memory(self) -> int:
        """Bytes that the device has free."""
        return int(self.device.get("free", 0))

    def execute(
        self, stage: str, module: str, *words: object, limit: float, **extra: str
    ) -> Ended:
        """Run a module with the device's Python to its end or `limit` seconds.

        Its output goes to the stage's log. Every few seconds `progress` gets the newest
        line of it.

        Args:
            extra: environment variables.

        Raises:
            Stopped: the run was interrupted.
            EnvironmentProblem: the Python does not exist.
        """
        log = self.folder(stage) / "log.txt"
        begin = time.monotonic()
        with log.open("ab") as output:
            place = output.tell()
            child = self.runner.start(
                [self.python, "-m", module, *map(str, words)],
                cwd=self.project.root,
                env=self._environment(extra),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        said = ""
        while (left := begin + limit - time.monotonic()) > 0:
            try:
                status = child.wait(timeout=min(EVERY, left))
            except subprocess.TimeoutExpired:
                line = _last_line(log, place)
                if line != said:
                    self.progress(f"{stage}: {line}")
                said = line
            else:
                kill_group(child.pid)
                return Ended(stage, log, status, time.monotonic() - begin)
        kill_group(child.pid)
        try:
            child.wait(timeout=GRACE)
            stuck = False
        except subprocess.TimeoutExpired:
            stuck = True
        return Ended(stage, log, TIMED_OUT, time.monotonic() - begin, stuck)

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The caller's environment, which may hold oneAPI's, without a network."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "TRITON_INTERPRET"
        }
        paths = [str(self.project.root), environment.get("PYTHONPATH", "")]
        return {
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **extra,
        }


Stage = Callable[[Setup], Outcome]


def _last_line(log: Path, start: int) -> str:
    """The last whole line that was written after `start`."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - 4096))
        lines = file.read().decode("utf-8", "replace").split("\n")
    whole = [line.strip() for line in lines[:-1] if line.strip()]
    return whole[-1][:160] if whole else ""
