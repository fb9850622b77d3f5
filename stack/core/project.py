# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a stack's repository lie."""

from dataclasses import dataclass
from pathlib import Path

from stack.core.errors import UsageError

RELEASES_FILE = "releases.toml"


@dataclass(frozen=True)
class Project:
    """A checkout of the stack's repository, recognized by its `releases.toml`."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> "Project":
        """The project that holds `start` (default: the current directory).

        Raises:
            UsageError: neither `start` nor a directory above it is a project.
        """
        here = (start or Path.cwd()).resolve()
        for directory in (here, *here.parents):
            if (directory / RELEASES_FILE).is_file():
                return cls(directory)
        raise UsageError(
            f"no {RELEASES_FILE} here or in any directory above",
            path=here,
            hint="cd into a checkout of the stack, then run the command again",
        )

    @property
    def releases_file(self) -> Path:
        return self.root / RELEASES_FILE

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def overlay(self) -> Path:
        return self.root / "vllm_overlay"

    @property
    def kernels(self) -> Path:
        return self.root / "kernels"

    @property
    def emulation(self) -> Path:
        return self.root / "standins"

    def series_dir(self, release_name: str) -> Path:
        """The folder of a release's series, such as `patches/v0.22.1`."""
        return self.patches / release_name
