# SPDX-License-Identifier: Apache-2.0
"""The stages `compare`, `tune` and `link`: programs of `benchmarks/`."""

import json
import shutil
from typing import Any

from proof.on_device.stages.doctor import GIB, LEAST_MEMORY
from proof.on_device.stages.records import Finding, Status
from proof.on_device.stages.setup import Ended, Outcome, Setup

COMPARE_SHARE = 0.3
TUNE_SHARE = 0.4
"""Shares of a stage's minutes in which a program starts a new measurement."""
LINK_SHARE = 0.2
LINK_MEMORY = 8 * GIB
"""A layer's experts on the device, and slots for as many."""
MORE_SECONDS = 120
"""What a program may take beside twice its measurements."""


def compare(setup: Setup) -> Outcome:
    """Ours beside what else is there, timed."""
    others = str(setup.project.root / ".bench")
    result = "benchmark.json"
    ended, report = _measured(
        setup,
        "compare",
        "lab.benchmarks.run",
        COMPARE_SHARE,
        result,
        "--others",
        others,
    )
    if isinstance(ended, Outcome):
        return ended
    rows = report["rows"]
    wrong = [row for row in rows if row["wrong"]]
    summary = f"{len(rows)} figures, {len(wrong)} wrong"
    findings = tuple(
        Finding(f"{row['op']} T{row['tokens']} {row['candidate']}: {row['wrong']}")
        for row in wrong[:20]
    )
    return _judged(ended, summary, findings, {"benchmark": report})


def tune(setup: Setup) -> Outcome:
    """Configurations measured, and the device's file written."""
    result = "tried.json"
    ended, tried = _measured(setup, "tune", "lab.benchmarks.tune", TUNE_SHARE, result)
    if isinstance(ended, Outcome):
        return ended
    (written,) = (
        path
        for path in setup.folder("tune").glob("*.json")
        if path.name not in (result, "result.json")
    )
    content = json.loads(written.read_text())
    shipped = setup.folder("tuned") / written.name
    shutil.copyfile(written, shipped)
    better = sum(map(len, content["rows"].values()))
    findings = tuple(
        Finding(f"the default of {t['kernel']}, {t['label']}: {t['wrong']}")
        for t in tried
        if t["wrong"] and t["configuration"] is None
    )
    return _judged(
        ended,
        f"{len(tried)} configurations tried, {better} beat the default",
        findings,
        {"file": f"tuned/{shipped.name}", "tried": tried, **content},
    )


def link(setup: Setup) -> Outcome:
    """The link to the host's memory, and a layer whose experts lie there."""
    module, result = "lab.benchmarks.expert_cache", "link.json"
    ended, found = _measured(
        setup, "link", module, LINK_SHARE, result, least=LINK_MEMORY
    )
    if isinstance(ended, Outcome):
        return ended
    rates = found["gb_per_second"]
    summary = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items())
    return _judged(ended, summary, (), found)


def _measured(
    setup: Setup,
    stage: str,
    module: str,
    share: float,
    result: str,
    *words: str,
    least: int = LEAST_MEMORY,
) -> tuple[Ended | Outcome, Any]:
    """How the program ended and the content of `result`; or the stage's outcome, where
    it is left out or has no result."""
    if setup.memory < least:
        free, need = setup.memory / GIB, least // GIB
        return Outcome("left out", f"{free:.1f} GiB free, {need} GiB needed"), None
    folder = setup.folder(stage)
    for old in folder.glob("*.json"):
        old.unlink()
    seconds = 60 * setup.minutes * share
    ended = setup.execute(
        stage,
        module,
        *("--device", setup.kind, "--out", folder, "--seconds", seconds, *words),
        limit=2 * seconds + MORE_SECONDS,
    )
    target = folder / result
    if not target.is_file():
        return ended.failed(module), None
    return ended, json.loads(target.read_text())


def _judged(
    ended: Ended, summary: str, findings: tuple[Finding, ...], data: dict[str, Any]
) -> Outcome:
    """The outcome of a program that left a result, whole or not."""
    if ended.timed_out:
        return ended.failed(summary, data)
    verdict: Status = "failed" if ended.returncode else "passed"
    return Outcome(verdict, summary, findings, data)
