# SPDX-License-Identifier: Apache-2.0
"""Versions of vllm-xpu-kernels that are newer than those which the pins ask for."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from xpustack.base.releases import Release

PROJECT = "vllm-xpu-kernels"
SCHEMAS = "emulated_xpu/schemas"
"""The op schemas of each version that somebody read."""


@dataclass(frozen=True)
class NewerKernels:
    """A pin's version of vllm-xpu-kernels, and a newer one on the index.

    `known` marks one that needs no action. An older release goes on asking for its
    own version. What is newer than the newest pin's is known once its op schemas are
    in `emulated_xpu/schemas`: the next release will ask for it or its successor.
    """

    release: str
    pinned: str
    newer: str
    known: bool


def newer_kernels(
    pins: Sequence[Release], offered: Iterable[Version], root: Path
) -> Iterator[NewerKernels]:
    """One row for each pin whose vllm-xpu-kernels has a newer fix release (the first
    three numbers are equal), and for the newest pin whatever is newer.

    Args:
        pins: oldest first, at least one.
        offered: the versions on the index.
        root: this repository.
    """
    versions = sorted(offered)
    for release in pins:
        own = Version(release.xpu_kernels.version)
        newest_pin = release is pins[-1]
        newer = [
            version
            for version in versions
            if version > own and (newest_pin or version.release[:3] == own.release[:3])
        ]
        for version in newer[-1:]:
            read = (root / SCHEMAS / f"{version}.txt").is_file()
            known = read or not newest_pin
            yield NewerKernels(release.name, str(own), str(version), known)
