# SPDX-License-Identifier: Apache-2.0
"""`xpustack device` and `ingest`: prove, compare, tune and serve on a GPU, report that,
and take in such a report."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from stack.base import releases
from stack.core.errors import CheckFailed, UsageError
from stack.core.process import Runner
from stack.core.project import Project
from stack.terminal.console import Reply, plain_number, showing_progress

FOLDER = ".device"
Minutes = Annotated[float, Parameter(converter=plain_number, validator=Number(gte=1))]


def device(
    *stage: str,
    kind: Annotated[Literal["xpu", "cuda"], Parameter("--device")] = "xpu",
    python: str = sys.executable,
    release: str | None = None,
    out: Path | None = None,
    minutes: Minutes = 25,
    model: Path | None = None,
    again: bool = False,
    answer: Reply,
) -> None:
    """Run kernels, benchmarks and vLLM's engine on a GPU, and write a report to send.

    Stages that passed are kept: a run that was interrupted goes on where it was. A
    stage that fails or hangs does not stop the others. Nothing is installed, and no
    network is used.

    Args:
        stage: doctor, prove, compare, tune, link, serve, model, report; all if none is
            named.
        kind: Where kernels run; nothing else is tried.
        python: The Python that has torch and Triton for the device.
        release: The release whose pins the machine is compared with; by default the
            newest.
        out: Where results go; by default .device/KIND.
        minutes: About how long a stage may take at most.
        model: Folder of a DeepSeek-V4 checkpoint, which the stage `model` serves with
            its experts in host memory.
        again: Run finished stages again.
    """
    from proof.on_device.stages import archive, doctor, session
    from proof.on_device.stages.records import STAGES
    from proof.on_device.stages.setup import Setup

    project = Project.find()
    unknown = [name for name in stage if name not in STAGES]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} is no stage",
            detail=[f"stages: {', '.join(STAGES)}"],
            hint="xpustack device --help",
        )
    program = shutil.which(python)
    if program is None:
        raise UsageError(
            "there is no such Python",
            path=python,
            hint="xpustack device --python PYTHON, one that has torch for the device",
        )
    if model is not None and not (model / "config.json").is_file():
        raise UsageError(
            "there is no checkpoint",
            path=model,
            hint="xpustack device --model FOLDER, with the checkpoint's config.json",
        )
    pinned = releases.load(project)
    folder = (out or project.root / FOLDER / kind).absolute()
    with showing_progress() as progress, Runner().stop_on_error() as runner:
        setup = Setup(
            project,
            kind,
            pinned[release or pinned.names[-1]],
            program,
            folder,
            minutes,
            runner,
            progress,
            model=model and model.absolute(),
        )
        done = session.run(setup, stage or STAGES, again=again)
    name = doctor.facts(setup)[0].found
    answer.data = {
        "device": name,
        "folder": str(folder),
        "stages": done.results,
        "kept": sorted(done.kept),
    }
    answer.say(f"device: {name} (--device {kind})")
    answer.table(
        (
            {
                "stage": result.stage,
                "verdict": result.status,
                "seconds": f"{result.seconds:.0f}"
                + (" *" if result.stage in done.kept else ""),
                "result": result.summary,
            }
            for result in done.results
        ),
        ("stage", "verdict", "seconds", "result"),
    )
    for result in done.results:
        answer.say(*(f"{result.stage}: {finding}" for finding in result.findings))
    if done.kept:
        answer.say("* from an earlier run")
    if done.report is not None:
        answer.say(f"to send: {folder / 'report' / archive.NAME}")
    answer.say(f"device: {name} (--device {kind})")
    if done.failed:
        answer.exit_code = CheckFailed.exit_code


def ingest(report: Path, /, *, answer: Reply) -> None:
    """Read a device's report into docs/devices.md, the cost model and the wheels.

    Args:
        report: What `xpustack device` wrote: the archive to send, or its report.json.
    """
    from proof.on_device.stages import archive
    from proof.on_device.stages.ingest import ingest as take_in

    said = take_in(Project.find(), archive.read(report))
    answer.data = {"ingested": said}
    answer.say(*said)
