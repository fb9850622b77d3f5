# SPDX-License-Identifier: Apache-2.0
"""A distribution that a base names in exactly one version."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PinnedDistribution:
    """A distribution in exactly one version.

    `file` is the base's file that names it; `hashes` are the sorted sha256 of its
    wheels for Linux on x86-64, empty if no index announces any; `url` is its direct
    address, None if it comes from an index.
    """

    name: str
    version: str
    file: str
    hashes: tuple[str, ...] = ()
    url: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"
