# SPDX-License-Identifier: Apache-2.0
"""The folders that a person tells a command to write to."""

from pathlib import Path

from xpustack.core.errors import UsageError


def vacant(directory: Path) -> bool:
    """Whether a command may write there: the folder is absent or empty."""
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
