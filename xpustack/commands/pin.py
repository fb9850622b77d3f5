# SPDX-License-Identifier: Apache-2.0
"""`xpustack pin`."""

from typing import Annotated

import msgspec
import typer

from xpustack.base import pin as core
from xpustack.core.project import Project
from xpustack.terminal.console import AsJson, answering, showing_progress, using_cache


def pin(
    version: Annotated[str, typer.Argument(help="Such as 0.24.0.")],
    as_json: AsJson = False,
) -> None:
    """Add a release to releases.toml: found, downloaded, hashed, and read."""
    with answering("pin", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            added = core.pin(Project.find(), cache, version, progress)
        answer.data = msgspec.to_builtins(added)
        answer.say(f"pinned {added.name}: {added.sdist} sha256 {added.sha256}")
