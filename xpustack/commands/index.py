# SPDX-License-Identifier: Apache-2.0
"""`xpustack index`: a package index of the wheels that were built."""

from pathlib import Path
from typing import Annotated

import typer

from xpustack.base import releases
from xpustack.core.project import Project
from xpustack.release.index_page import write_index
from xpustack.terminal.console import AsJson, answering


def index(
    directory: Annotated[
        Path, typer.Argument(help="Where `xpustack build` put the releases.")
    ] = Path("dist"),
    as_json: AsJson = False,
) -> None:
    """Write a static package index (PEP 503) and checksums beside built wheels."""
    with answering("index", as_json) as answer:
        indexed = write_index(releases.load(Project.find()), directory)
        answer.data = {
            "directory": str(indexed.directory),
            "wheels": dict(indexed.wheels),
        }
        answer.say(*(f"{digest}  {name}" for name, digest in indexed.wheels.items()))
        answer.say(f"{len(indexed.wheels)} wheels listed in {directory}/simple")
