# SPDX-License-Identifier: Apache-2.0
"""The form in which files, programs and distributions are named."""

import hashlib
from dataclasses import dataclass

import msgspec


class Resource(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file or a program that goes into a wheel, or a part of what runs it, as a
    provenance names it.

    `name` is a file's path in this repository, the archive's file name for a base, or
    its path in the tree for a file that the tool generates. The annotations are its
    `kind`, the `step` that has it, and where it `lands` in the tree if a step adds it.
    """

    name: str
    uri: str = ""
    digest: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def sha256(self) -> str:
        return self.digest.get("sha256", "")

    @property
    def kind(self) -> str:
        return self.annotations.get("kind", "")

    @property
    def step(self) -> str:
        return self.annotations.get("step", "")


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


def sha256_of(data: bytes) -> str:
    """The sha256 of `data`, 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
