# SPDX-License-Identifier: Apache-2.0
"""Runs the stages: keeps finished results, and goes on after a failed stage."""

import dataclasses
import time
from collections.abc import Sequence

from xpustack.core.cache import atomic_file
from xpustack.core.errors import EnvironmentProblem, command
from xpustack.core.fingerprint import digest, files_digest, folder_files
from xpustack.core.version import version
from xpustack.device import archive, page, serve, stages
from xpustack.device.records import (
    SCHEMA,
    STAGES,
    Report,
    StageResult,
    read_result,
    write,
)
from xpustack.device.stages import Bench, Outcome, Stage

_CODE = ("kernels", "benchmarks", "tests/kernels", "e2e", "xpustack/device")
"""Folders that decide what a stage gives."""
_STABLE = ("free memory",)
"""Facts that change from run to run."""
_RUNS: dict[str, Stage] = {
    "prove": stages.prove,
    "compare": stages.compare,
    "tune": stages.tune,
    "serve": serve.serve,
}


@dataclasses.dataclass(frozen=True)
class Session:
    """What ran and what was kept.

    Attributes:
        results: of all stages that have one, in order.
        kept: names of those that ran before.
        report: None unless it was asked for.
    """

    results: tuple[StageResult, ...]
    kept: frozenset[str]
    report: Report | None = None

    @property
    def failed(self) -> bool:
        return any(result.status == "failed" for result in self.results)


def run(bench: Bench, chosen: Sequence[str], *, again: bool = False) -> Session:
    """Run the chosen stages in their order; the doctor always goes first.

    Args:
        again: run stages that have a result, too.

    Raises:
        EnvironmentProblem: there is no device to run on.
    """
    results, kept = {}, set()
    doctor = _timed(bench, "doctor", stages.diagnose, "")
    write(bench.folder("doctor") / "result.json", doctor)
    fatal = doctor.status == "failed"
    results["doctor"] = doctor
    if fatal and not (bench.probe.get("device") and "report" in chosen):
        worst = doctor.findings[0] if doctor.findings else None
        raise EnvironmentProblem(
            f"no {bench.kind} device to run on: {doctor.summary}",
            detail=[str(finding) for finding in doctor.findings[1:]],
            path=bench.folder("doctor") / "log.txt",
            hint=(worst.fix if worst else "")
            or command("python", "-m", "xpustack", "device", "doctor", "-h"),
        )
    code = _code(bench)
    for stage in STAGES:
        if stage not in _RUNS:
            continue
        path = bench.folder(stage) / "result.json"
        key = _key(bench, stage, code)
        found = read_result(path)
        if found is not None and found.key != key:
            found = None
        if stage not in chosen or fatal:
            if found is not None:
                results[stage] = found
                kept.add(stage)
            continue
        if found is not None and found.status == "passed" and not again:
            bench.progress(f"{stage}: kept from an earlier run")
            kept.add(stage)
        else:
            found = _timed(bench, stage, _RUNS[stage], key)
            write(path, found)
        results[stage] = found
    ordered = tuple(results[stage] for stage in STAGES if stage in results)
    if "report" not in chosen:
        return Session(ordered, frozenset(kept))
    report = Report(
        SCHEMA,
        version(bench.project.root),
        time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        bench.kind,
        bench.facts()[0].found,
        bench.release.name,
        bench.facts(),
        ordered,
    )
    folder = bench.folder("report")
    write(folder / "report.json", report)
    with atomic_file(folder / "report.md") as file:
        file.write(page.text(report).encode())
    archive.write(bench, report)
    return Session(ordered, frozenset(kept), report)


def _timed(bench: Bench, stage: str, run: Stage, key: str) -> StageResult:
    bench.progress(f"{stage}: started")
    begin = time.monotonic()
    try:
        outcome = run(bench)
    except (OSError, ValueError, KeyError) as error:
        outcome = Outcome("failed", f"{type(error).__name__}: {error}")
    result = outcome.result(stage, key, time.monotonic() - begin)
    bench.progress(
        f"{stage}: {result.status}, {result.seconds:.0f} s: {result.summary}"
    )
    return result


def _code(bench: Bench) -> str:
    root = bench.project.root
    files = {
        f"{folder}/{name}": path
        for folder in _CODE
        for name, path in folder_files(root / folder).items()
    }
    return files_digest(files)


def _key(bench: Bench, stage: str, code: str) -> str:
    facts = (f"{f.name}={f.found}" for f in bench.facts() if f.name not in _STABLE)
    return digest(
        stage=stage,
        kind=bench.kind,
        release=bench.release.name,
        code=code,
        facts=list(facts),
    )
