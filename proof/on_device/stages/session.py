# SPDX-License-Identifier: Apache-2.0
"""Runs the stages: keeps finished results, and goes on after a failed stage."""

import dataclasses
import time
from collections.abc import Sequence

from proof.on_device.stages import (
    archive,
    doctor,
    measure,
    model,
    page,
    prove,
    serve,
)
from proof.on_device.stages.records import (
    SCHEMA,
    STAGES,
    Report,
    StageResult,
    read_result,
    write,
)
from proof.on_device.stages.setup import Outcome, Setup, Stage
from stack.core.cache import atomic_file
from stack.core.errors import EnvironmentProblem, command
from stack.core.fingerprint import digest, files_digest, folder_files
from stack.core.history import version

_CODE = ("kernels", "lab/benchmarks", "tests/kernels", "proof")
"""Folders that decide what a stage gives."""
_STABLE = ("free memory",)
"""Facts that change from run to run."""
_RUNS: dict[str, Stage] = {
    "prove": prove.prove,
    "compare": measure.compare,
    "tune": measure.tune,
    "link": measure.link,
    "serve": serve.serve,
    "model": model.serve,
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


def run(setup: Setup, chosen: Sequence[str], *, again: bool = False) -> Session:
    """Run the chosen stages in their order; the doctor always goes first.

    Args:
        again: run stages that have a result, too.

    Raises:
        EnvironmentProblem: there is no device to run on.
    """
    results, kept = {}, set()
    first = _timed(setup, "doctor", doctor.diagnose, "")
    write(setup.folder("doctor") / "result.json", first)
    fatal = first.status == "failed"
    results["doctor"] = first
    if fatal and not (setup.device and "report" in chosen):
        worst = first.findings[0] if first.findings else None
        raise EnvironmentProblem(
            f"no {setup.kind} device to run on: {first.summary}",
            detail=[str(finding) for finding in first.findings[1:]],
            path=setup.folder("doctor") / "log.txt",
            hint=(worst.fix if worst else "")
            or command("xpustack", "device", "doctor", "-h"),
        )
    code = _code(setup)
    for stage in STAGES:
        if stage not in _RUNS:
            continue
        path = setup.folder(stage) / "result.json"
        key = _key(setup, stage, code)
        found = read_result(path)
        if found is not None and found.key != key:
            found = None
        if stage not in chosen or fatal:
            if found is not None:
                results[stage] = found
                kept.add(stage)
            continue
        if found is not None and found.status == "passed" and not again:
            setup.progress(f"{stage}: kept from an earlier run")
            kept.add(stage)
        else:
            found = _timed(setup, stage, _RUNS[stage], key)
            write(path, found)
        results[stage] = found
    ordered = tuple(results[stage] for stage in STAGES if stage in results)
    if "report" not in chosen:
        return Session(ordered, frozenset(kept))
    facts = doctor.facts(setup)
    report = Report(
        SCHEMA,
        version(),
        time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        setup.kind,
        facts[0].found,
        setup.release.name,
        facts,
        ordered,
    )
    folder = setup.folder("report")
    write(folder / "report.json", report)
    with atomic_file(folder / "report.md") as file:
        file.write(page.text(report).encode())
    archive.write(setup)
    return Session(ordered, frozenset(kept), report)


def _timed(setup: Setup, stage: str, run: Stage, key: str) -> StageResult:
    setup.progress(f"{stage}: started")
    begin = time.monotonic()
    try:
        outcome = run(setup)
    except (OSError, ValueError, KeyError) as error:
        outcome = Outcome("failed", f"{type(error).__name__}: {error}")
    result = outcome.result(stage, key, time.monotonic() - begin)
    setup.progress(
        f"{stage}: {result.status}, {result.seconds:.0f} s: {result.summary}"
    )
    return result


def _code(setup: Setup) -> str:
    root = setup.project.root
    files = {
        f"{folder}/{name}": path
        for folder in _CODE
        for name, path in folder_files(root / folder).items()
    }
    return files_digest(files)


def _key(setup: Setup, stage: str, code: str) -> str:
    facts = (f for f in doctor.facts(setup) if f.name not in _STABLE)
    return digest(
        stage=stage,
        kind=setup.kind,
        release=setup.release.name,
        model=str(setup.model or "") if stage == "model" else "",
        code=code,
        facts=[f"{fact.name}={fact.found}" for fact in facts],
    )
