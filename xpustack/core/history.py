# SPDX-License-Identifier: Apache-2.0
"""What this repository's own git knows: who works here, and when steps came.

Asked as the person at the keyboard would ask, with their configuration; a project
that is no git repository has no answers.
"""

import subprocess
from pathlib import Path

from xpustack.core.git import DATE
from xpustack.core.project import Project


def configured(project: Project, key: str) -> str:
    """A setting of git, such as `user.name`; empty where it is not set."""
    return _ask(project, "config", "--get", key)


def changed(project: Project, path: Path) -> str:
    """When a file was changed last, in git's raw format; the date of every tree of
    this stack where the file is not committed."""
    options = ("--format=%ad", "--date=raw", "--", str(path))
    return _ask(project, "log", "-1", *options) or DATE


def commit(project: Project) -> str:
    """The checked-out commit, 12 hexadecimal digits, with `, changed` where tracked
    files differ from it; empty where there is none."""
    name = _ask(project, "rev-parse", "--short=12", "HEAD")
    differs = name and _ask(project, "status", "--porcelain", "--untracked-files=no")
    return f"{name}, changed" if differs else name


def added(project: Project, folder: Path) -> dict[str, int]:
    """When each file below `folder` was first added, in seconds since 1970, by its
    path relative to the project. Files that are not committed are absent."""
    found: dict[str, int] = {}
    when = 0
    options = ("--diff-filter=A", "--no-renames", "--relative", "--name-only")
    log = _ask(project, "log", *options, "--format=%x00%at", "--", str(folder))
    for line in log.splitlines():
        if line.startswith("\0"):
            when = int(line[1:])
        elif line:
            # The log goes back in time, so the oldest word stays.
            found[line] = when
    return found


def _ask(project: Project, *words: str) -> str:
    command = ["git", "-C", str(project.root), *words]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    # A name or a file may be in another encoding than UTF-8.
    text = done.stdout.decode("utf-8", "replace")
    return text.strip(" \n") if done.returncode == 0 else ""
