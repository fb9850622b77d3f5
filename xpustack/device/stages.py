# SPDX-License-Identifier: Apache-2.0
"""The stages: which programs each one runs, and what it makes of their output."""

import json
import os
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from xpustack.base.releases import Release
from xpustack.core import cpus
from xpustack.core.process import Runner
from xpustack.core.progress import Progress
from xpustack.core.project import Project
from xpustack.device import aot_table, child, doctor
from xpustack.device.records import Fact, Finding, Kind, StageResult, Status

PROGRAMS = Path(__file__).with_name("programs")
PROBE_SECONDS = 300.0
TEST_SHARE = 0.8
"""Share of a stage's minutes that the kernel tests may take."""
MEMORY_OF_A_TEST = 8 * doctor.GIB
"""Device memory that each process of the kernel tests may need."""


@dataclass
class Bench:
    """The device, the Python and the folder of a run of stages.

    Attributes:
        python: the interpreter with torch for the device.
        out: the folder of all results.
        minutes: about how long a stage may take at most.
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

    def folder(self, stage: str) -> Path:
        folder = self.out / stage
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def execute(
        self, stage: str, command: list[str], limit: float, **extra: str
    ) -> child.Ended:
        """Run a program with the device's Python; output in the stage's log."""
        return child.run(
            self.runner,
            [self.python, *command],
            cwd=self.project.root,
            env=self._environment(extra),
            limit=limit,
            log=self.folder(stage) / "log.txt",
            progress=lambda line: self.progress(f"{stage}: {line}"),
        )

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The caller's environment, which may hold oneAPI's, without a network."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("TRITON_INTERPRET", "XPU_DSV4_TUNED")
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

    @property
    def memory(self) -> int:
        """Bytes that the device has free."""
        device = self.probe.get("device") or {}
        return int(device.get("free", 0))

    def facts(self) -> tuple[Fact, ...]:
        return doctor.facts(self.probe, self.kind, self.release)


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


Stage = Callable[[Bench], Outcome]


def hung(bench: Bench, stage: str, what: str, ended: child.Ended) -> Outcome:
    """The outcome of a program that ran into its time limit."""
    left = ", and its process cannot be ended: the driver hangs" if ended.stuck else ""
    last = "".join(child.tail(bench.folder(stage) / "log.txt", 1))
    return Outcome(
        "failed",
        f"{what}: did not end within {ended.seconds:.0f} s{left}",
        (
            Finding(
                f"last line: {last}",
                "sudo dmesg | tail -n 50; then run again, with more --minutes",
            ),
        ),
    )


def crashed(bench: Bench, stage: str, what: str, ended: child.Ended) -> Outcome:
    """The outcome of a program that failed without a result."""
    lines = child.tail(bench.folder(stage) / "log.txt")
    return Outcome(
        "failed",
        f"{what} ended with exit status {ended.returncode}",
        tuple(Finding(line) for line in lines if line.strip()),
    )


def diagnose(bench: Bench) -> Outcome:
    """The doctor: facts beside the pins, and what is wrong."""
    target = bench.folder("doctor") / "probe.json"
    target.unlink(missing_ok=True)
    program = str(PROGRAMS / "probe.py")
    limit = min(PROBE_SECONDS, 60 * bench.minutes)
    ended = bench.execute("doctor", [program, bench.kind, str(target)], limit)
    try:
        bench.probe = json.loads(target.read_text())
    except (OSError, ValueError):
        bench.probe = {}
    if ended.timed_out:
        return hung(bench, "doctor", "torch and a first kernel", ended)
    if ended.returncode or not bench.probe:
        return crashed(bench, "doctor", "the probe", ended)
    known = doctor.known_devices(bench.project)
    found = tuple(doctor.findings(bench.probe, bench.kind, bench.release, known))
    data = {
        "facts": msgspec.to_builtins(bench.facts()),
        "probe": bench.probe,
        "known_as": doctor.known_as(_name(bench), known) if _name(bench) else "",
    }
    if any(finding.fatal for finding in found):
        return Outcome("failed", found[0].what, found, data)
    return Outcome("passed", f"{_name(bench)}, {len(found)} findings", found, data)


def _name(bench: Bench) -> str:
    return str((bench.probe.get("device") or {}).get("name", ""))


def prove(bench: Bench) -> Outcome:
    """The kernel tests on the device, then what its driver made of the kernels."""
    if not bench.probe["distributions"].get("pytest"):
        return Outcome(
            "left out",
            "pytest is not installed",
            (Finding("the kernel tests need pytest", "pip install pytest"),),
        )
    folder = bench.folder("prove")
    junit, cache = folder / "junit.xml", folder / "triton"
    junit.unlink(missing_ok=True)
    command = [
        *("-m", "pytest", "tests/kernels", "--device", bench.kind, "-q"),
        *("-p", "no:cacheprovider", f"--junit-xml={junit}"),
    ]
    processes = min(
        max(1, bench.memory // MEMORY_OF_A_TEST), max(1, cpus.usable() // 2), 8
    )
    if processes > 1 and _has(bench, "xdist"):
        command += ["--numprocesses", str(processes)]
    ended = bench.execute(
        "prove", command, 60 * bench.minutes * TEST_SHARE, TRITON_CACHE_DIR=str(cache)
    )
    rows, problems = _machine_code(bench, cache)
    if ended.timed_out:
        late = hung(bench, "prove", "the kernel tests", ended)
        return Outcome(
            "failed", late.summary, (*late.findings, *problems), {"machine_code": rows}
        )
    if not junit.is_file():
        return crashed(bench, "prove", "pytest", ended)
    counts, failures = _junit(junit)
    return Outcome(
        "failed" if ended.returncode else "passed",
        f"{counts['tests'] - counts['skipped'] - counts['failed']} tests passed,"
        f" {counts['failed']} failed, {counts['skipped']} skipped",
        (*(Finding(f"failed: {name}") for name in failures[:20]), *problems),
        {"tests": counts, "machine_code": rows},
    )


def _has(bench: Bench, module: str) -> bool:
    ended = bench.execute("prove", ["-c", f"import {module}"], 60)
    return ended.returncode == 0


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
    bench: Bench, cache: Path
) -> tuple[list[dict[str, Any]], tuple[Finding, ...]]:
    """What the driver's compiler made, each row beside the ahead-of-time table."""
    target = bench.folder("prove") / "machine_code.json"
    target.unlink(missing_ok=True)
    program = str(PROGRAMS / "machine_code.py")
    kernels = str(bench.project.kernels / "xpu_dsv4")
    ended = bench.execute(
        "prove",
        [program, bench.kind, kernels, str(cache), str(target)],
        60 * bench.minutes * 0.15,
    )
    rows = json.loads(target.read_text()) if target.is_file() else []
    expected = aot_table.read(bench.project.root) if bench.kind == "xpu" else {}
    findings = []
    if ended.returncode:
        findings.append(Finding("reading the machine code failed before its end"))
    for row in rows:
        aot = expected.get((row["kernel"], row["warps"], row["grf"]))
        row["aot_spill"], row["aot_dpas"] = (
            (aot.spill, aot.dpas) if aot else (None, None)
        )
        if aot and row["spill"] > aot.spill:
            findings.append(
                Finding(
                    f"{row['kernel']} with {row['warps']} sub-groups: the driver's"
                    f" compiler spills {row['spill']}, ahead of time {aot.spill}"
                )
            )
    return rows, tuple(findings)


def compare(bench: Bench) -> Outcome:
    """Ours beside what else is there, timed."""
    if bench.memory < doctor.LEAST_MEMORY:
        return _too_little(bench)
    folder = bench.folder("compare")
    target = folder / "benchmark.json"
    target.unlink(missing_ok=True)
    seconds = 60 * bench.minutes * 0.3
    ended = bench.execute(
        "compare",
        [
            *("-m", "benchmarks.run", "--device", bench.kind, "--out", str(folder)),
            *(
                "--seconds",
                str(seconds),
                "--others",
                str(bench.project.root / ".bench"),
            ),
        ],
        2 * seconds + 120,
    )
    if not target.is_file():
        failed = hung if ended.timed_out else crashed
        return failed(bench, "compare", "benchmarks.run", ended)
    report = json.loads(target.read_text())
    rows = report["rows"]
    wrong = [row for row in rows if row["wrong"]]
    findings = tuple(
        Finding(f"{row['op']} T{row['tokens']} {row['candidate']}: {row['wrong']}")
        for row in wrong[:20]
    )
    summary = f"{len(rows)} figures, {len(wrong)} wrong"
    if ended.timed_out:
        late = hung(bench, "compare", summary, ended)
        return Outcome("failed", late.summary, late.findings, {"benchmark": report})
    return Outcome(
        "failed" if ended.returncode else "passed",
        summary,
        findings,
        {"benchmark": report},
    )


def _too_little(bench: Bench) -> Outcome:
    need = doctor.LEAST_MEMORY // doctor.GIB
    return Outcome(
        "left out", f"{bench.memory / doctor.GIB:.1f} GiB free, {need} GiB needed"
    )


def tune(bench: Bench) -> Outcome:
    """Configurations measured, and the device's file written."""
    if bench.memory < doctor.LEAST_MEMORY:
        return _too_little(bench)
    folder = bench.folder("tune")
    for old in folder.glob("*.json"):
        old.unlink()
    seconds = 60 * bench.minutes * 0.4
    ended = bench.execute(
        "tune",
        [
            *("-m", "benchmarks.tune", "--device", bench.kind, "--out", str(folder)),
            *("--seconds", str(seconds)),
        ],
        2 * seconds + 120,
    )
    tried = folder / "tried.json"
    if not tried.is_file():
        failed = hung if ended.timed_out else crashed
        return failed(bench, "tune", "benchmarks.tune", ended)
    attempts = json.loads(tried.read_text())
    (written,) = (
        p for p in folder.glob("*.json") if p.name not in ("tried.json", "result.json")
    )
    content = json.loads(written.read_text())
    rows = content["rows"]
    shipped = bench.out / "tuned"
    shipped.mkdir(exist_ok=True)
    shutil.copyfile(written, shipped / written.name)
    count = sum(map(len, rows.values()))
    data = {"file": f"tuned/{written.name}", "tried": attempts, **content}
    summary = f"{len(attempts)} configurations tried, {count} beat the default"
    if ended.timed_out:
        late = hung(bench, "tune", summary, ended)
        return Outcome("failed", late.summary, late.findings, data)
    findings = tuple(
        Finding(f"the default of {t['kernel']}, {t['label']}: {t['wrong']}")
        for t in attempts
        if t["wrong"] and t["configuration"] is None
    )
    return Outcome("failed" if ended.returncode else "passed", summary, findings, data)
