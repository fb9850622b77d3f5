# SPDX-License-Identifier: Apache-2.0
"""The releases that a command works on: one that is named, or all."""

from typing import Annotated

from cyclopts import Parameter

from xpustack.base.releases import Release, Releases
from xpustack.core.errors import UsageError

ReleaseName = Annotated[str | None, Parameter(help="Such as v0.22.1.")]
AllReleases = Annotated[bool, Parameter("--all", help="Every release.")]


def selected(
    pinned: Releases, name: str | None, all_releases: bool, command: str
) -> list[Release]:
    """The release `name`, or all.

    Raises:
        UsageError: neither or both are asked for, or there is no such release.
    """
    if (name is None) is not all_releases:
        raise UsageError(
            "name one RELEASE, or say --all", hint=f"xpustack {command} --help"
        )
    return list(pinned) if name is None else [pinned[name]]
