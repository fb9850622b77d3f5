# SPDX-License-Identifier: Apache-2.0
"""The stage `prove`: the kernel tests on the device, then what its driver made of the
kernels, beside what Intel's compiler makes of them ahead of time."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from proof.on_device.stages.doctor import GIB
from proof.on_device.stages.records import Finding
from proof.on_device.stages.setup import Outcome, Setup
from stack.core.process import usable_cpus
from stack.core.rows import read_rows

TEST_SHARE = 0.8
"""Share of a stage's minutes that the kernel tests may take."""
MACHINE_CODE_SHARE = 0.15
MEMORY_OF_A_TEST = 8 * GIB
"""Device memory that each process of the kernel tests may need."""
MOST_PROCESSES = 8
AHEAD_OF_TIME = "docs/data/machine_code.csv"
"""The rows of `python -m lab.aot --docs`."""


def prove(setup: Setup) -> Outcome:
    """Run the stage `prove`."""
    installed = setup.probe["distributions"]
    if not installed.get("pytest"):
        return Outcome(
            "left out",
            "pytest is not installed",
            (Finding("the kernel tests need pytest", "pip install pytest"),),
        )
    folder = setup.folder("prove")
    junit, cache = folder / "junit.xml", folder / "triton"
    junit.unlink(missing_ok=True)
    words = [
        *("tests/kernels", "--device", setup.kind, "-q"),
        *("-p", "no:cacheprovider", f"--junit-xml={junit}"),
    ]
    processes = min(setup.memory // MEMORY_OF_A_TEST, usable_cpus() // 2)
    if processes > 1 and installed.get("pytest-xdist"):
        words += ["--numprocesses", str(min(processes, MOST_PROCESSES))]
    limit = 60 * setup.minutes * TEST_SHARE
    ended = setup.execute(
        "prove", "pytest", *words, limit=limit, TRITON_CACHE_DIR=str(cache)
    )
    rows, problems = _machine_code(setup, cache)
    data: dict[str, Any] = {"machine_code": rows}
    if ended.timed_out or not junit.is_file():
        failed = ended.failed("the kernel tests", data)
        return Outcome("failed", failed.summary, (*failed.findings, *problems), data)
    counts, failures = _junit(junit)
    return Outcome(
        "failed" if ended.returncode else "passed",
        f"{counts['tests'] - counts['skipped'] - counts['failed']} tests passed,"
        f" {counts['failed']} failed, {counts['skipped']} skipped",
        (*(Finding(f"failed: {name}") for name in failures[:20]), *problems),
        {"tests": counts, **data},
    )


def _junit(path: Path) -> tuple[dict[str, int], list[str]]:
    """Counts of the tests, and the names of those that failed."""
    cases = list(ET.parse(path).getroot().iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"tests": len(cases), "failed": len(failed), "skipped": skipped}, failed


def _machine_code(
    setup: Setup, cache: Path
) -> tuple[list[dict[str, Any]], tuple[Finding, ...]]:
    """What the driver's compiler made, each row beside the ahead-of-time table."""
    target = setup.folder("prove") / "machine_code.json"
    target.unlink(missing_ok=True)
    ended = setup.execute(
        "prove",
        "proof.on_device.machine_code",
        *(setup.kind, setup.project.kernels / "xpu_dsv4", cache, target),
        limit=60 * setup.minutes * MACHINE_CODE_SHARE,
    )
    rows = json.loads(target.read_text()) if target.is_file() else []
    ahead = ahead_of_time(setup.project.root) if setup.kind == "xpu" else {}
    findings = []
    if ended.returncode:
        findings.append(Finding("reading the machine code failed before its end"))
    for row in rows:
        key = (row["kernel"], row["warps"], row["grf"])
        row["aot_spill"], row["aot_dpas"] = ahead.get(key, (None, None))
        if key in ahead and row["spill"] > row["aot_spill"]:
            findings.append(
                Finding(
                    f"{row['kernel']} with {row['warps']} sub-groups: the driver's"
                    f" compiler spills {row['spill']}, ahead of time {row['aot_spill']}"
                )
            )
    return rows, tuple(findings)


def ahead_of_time(root: Path) -> dict[tuple[str, int, str], tuple[int, int]]:
    """The most spill and dpas of each of our kernels, by its name, warps and the GRF
    mode asked for; none without the file."""
    found: dict[tuple[str, int, str], tuple[int, int]] = {}
    for row in read_rows(root / AHEAD_OF_TIME):
        if row["by"] == "This stack" and row["device"]:
            key = (row["kernel"], int(row["warps"]), row["grf asked"])
            spill, dpas = found.get(key, (0, 0))
            found[key] = max(spill, int(row["spill"])), max(dpas, int(row["dpas"]))
    return found
