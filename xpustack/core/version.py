# SPDX-License-Identifier: Apache-2.0
"""Which version of the tool runs."""

import tomllib
from importlib import metadata
from pathlib import Path

from xpustack.core import history
from xpustack.core.project import Project

_NAME = "xpustack"


def version(home: Path | None = None) -> str:
    """`xpustack 0.1.0`, and in a git checkout its commit and whether files changed.

    Args:
        home: the folder above the package; None for where this code lies.
    """
    home = home or Path(__file__).parents[2]
    described = home / "pyproject.toml"
    if not described.is_file():
        return f"{_NAME} {metadata.version(_NAME)}"
    number = tomllib.loads(described.read_text("utf-8"))["project"]["version"]
    commit = history.current_commit(Project(home))
    return f"{_NAME} {number} ({commit})" if commit else f"{_NAME} {number}"
