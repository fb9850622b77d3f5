# SPDX-License-Identifier: Apache-2.0
"""Calls of `xpustack device` in a made-up checkout, and what they left there."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Result, invoke
from fake_python import DEVICE, PROBE


def call(checkout: Path, *words: str) -> Result:
    """Run the command in the checkout."""
    python = str(checkout.parent / "python")
    return invoke("device", "--python", python, *words)


def calls(checkout: Path) -> list[str]:
    """Programs that ran, in order; forgotten afterwards."""
    path = checkout.parent / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line for line in lines if line != "all_reduce"]


def fake(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    monkeypatch.setenv("FAKE_DEVICE", json.dumps(settings))


def stages(done: Result) -> dict[str, str]:
    data = json.loads(done.stdout)["data"]
    return {stage["stage"]: stage["status"] for stage in data["stages"]}


def report_of(checkout: Path) -> dict[str, Any]:
    path = checkout / ".device/xpu/report/report.json"
    return json.loads(path.read_text())


def device(**changes: Any) -> dict[str, Any]:
    return {"device": {**DEVICE, **changes}}


def serving(monkeypatch: pytest.MonkeyPatch, devices: int = 1, **settings: Any) -> None:
    """The fake has vLLM, and `devices` devices."""
    installed = {**PROBE["distributions"], "vllm": "0.33.0"}
    probe = {**device(count=devices), "distributions": installed}
    fake(monkeypatch, probe=probe, **settings)
