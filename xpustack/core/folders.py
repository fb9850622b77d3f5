# SPDX-License-Identifier: Apache-2.0
"""Folders that a person names for a command to fill."""

from pathlib import Path

from xpustack.core.errors import UsageError


def vacant(directory: Path) -> bool:
    """Whether a folder may be made there: nothing is there, or an empty folder."""
    if not directory.exists():
        return True
    return directory.is_dir() and not any(directory.iterdir())


def not_ours(directory: Path, release: str, command: str) -> UsageError:
    """The error about a folder with files that `xpustack COMMAND` did not make."""
    return UsageError(
        f"the directory is not empty and was not made by xpustack {command}",
        release=release,
        path=directory,
        hint="choose a new directory",
    )
