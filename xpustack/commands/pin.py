# SPDX-License-Identifier: Apache-2.0
"""`xpustack pin`: add a release to releases.toml."""

from typing import Annotated

import msgspec
import typer

from xpustack.base.pin import pin as pin_release
from xpustack.core.project import Project
from xpustack.terminal.console import AsJson, answering, showing_progress, using_cache


def pin(
    version: Annotated[str, typer.Argument(help="Such as 0.24.0.")],
    as_json: AsJson = False,
) -> None:
    """Find, download, hash and read a release, and add it to releases.toml."""
    with answering("pin", as_json) as answer:
        with showing_progress() as progress, using_cache() as cache:
            release = pin_release(Project.find(), cache, version, progress)
        answer.data = msgspec.to_builtins(release)
        answer.say(f"pinned {release.name}: {release.sdist} sha256 {release.sha256}")
