# SPDX-License-Identifier: Apache-2.0
"""`xpustack ingest`: take in what a device's owner sent."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.core.project import Project
from xpustack.device import archive
from xpustack.device.ingest import ingest as take_in
from xpustack.terminal.console import AsJson, answering


def ingest(
    report: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `xpustack device` wrote.")
    ],
    as_json: AsJson = False,
) -> None:
    """Read a device's report into docs/devices.md, the cost model and the wheels.

    FILE is the archive to send, or its report.json."""
    with answering("ingest", as_json) as answer:
        said = take_in(Project.find(), archive.read(report))
        answer.data = {"ingested": said}
        answer.say(*said)
