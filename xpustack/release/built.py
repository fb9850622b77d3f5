# SPDX-License-Identifier: Apache-2.0
"""A newly built wheel, with all that the files beside it say."""

from collections.abc import Mapping
from dataclasses import dataclass

from xpustack.base.releases import Release
from xpustack.builds import wheel
from xpustack.release.resource import Resource, sha256_of
from xpustack.release.runtime import Runtime
from xpustack.series.tree import Step, Tree


@dataclass(frozen=True)
class WheelBuild:
    """A wheel and what it was made of.

    Attributes:
        data: the wheel's canonical archive.
        tool: the sha256 of each module of the tool that takes part.
        machine: the version of each program that does.
    """

    release: Release
    version: str
    name: str
    data: bytes
    wheel: wheel.Wheel
    tip: Tree
    steps: tuple[Step, ...]
    parts: tuple[Resource, ...]
    runtime: Runtime
    tool: Mapping[str, str]
    machine: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The wheel's sha256."""
        return sha256_of(self.data)
