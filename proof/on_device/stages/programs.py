# SPDX-License-Identifier: Apache-2.0
"""Programs that serve, run for a stage: each ends within its share of the time."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.on_device.stages.records import Finding
from proof.on_device.stages.setup import Outcome, Setup


class StageStopped(Exception):
    """A program of the stage failed: nothing after it means anything."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.summary)
        self.outcome = outcome


@dataclass(frozen=True)
class Programs:
    """What a stage runs with the device's Python, and the folder of its files."""

    setup: Setup
    stage: str

    @property
    def folder(self) -> Path:
        return self.setup.folder(self.stage)

    def engine(
        self,
        name: str,
        model: Path,
        waves: list[list[dict[str, Any]]],
        share: float = 0.3,
        **engine: Any,
    ) -> dict[str, Any]:
        """What vLLM's engine answers; `engine` are its arguments.

        Raises:
            StageStopped: it did not end well.
        """
        job = {"model": str(model), "engine": engine, "waves": waves}
        what = f"the engine, {name}"
        module = "proof.on_device.engine"
        found: dict[str, Any] = self.answer(module, name, job, share=share, what=what)
        return found

    def answer(
        self, module: str, name: str, job: object, *words: object, **limits: Any
    ) -> Any:
        """What a program writes about a job; the files of both bear `name`.

        Raises:
            StageStopped: it did not end well.
        """
        stem = name.replace(" ", "-")
        order, answer = (self.folder / f"{stem}.{x}.json" for x in "ja")
        order.write_text(json.dumps(job))
        answer.unlink(missing_ok=True)
        self.run(module, *words, order, answer, **limits)
        return json.loads(answer.read_text())

    def run(
        self,
        module: str,
        *words: object,
        share: float = 0.0,
        limit: float = 0.0,
        what: str = "",
    ) -> float:
        """Run a program within its share of the time, or `limit` seconds; how many it
        took.

        Raises:
            StageStopped: it failed, or ran into its limit.
        """
        limit = limit or 60 * self.setup.minutes * share
        ended = self.setup.execute(self.stage, module, *words, limit=limit)
        if ended.returncode:
            raise StageStopped(ended.failed(what or module))
        return ended.seconds


def without_vllm(setup: Setup) -> Outcome | None:
    """Why a stage that serves is left out; None where vLLM serves on this device."""
    if not setup.probe["distributions"].get("vllm"):
        return Outcome(
            "left out",
            "vllm is not installed",
            (
                Finding(
                    "serving needs the patched vLLM beside torch",
                    "install its wheel: docs/deploying.md",
                ),
            ),
        )
    if setup.kind != "xpu":
        return Outcome(
            "left out", "the XPU code path of vLLM needs an XPU; this is a CUDA device"
        )
    return None
