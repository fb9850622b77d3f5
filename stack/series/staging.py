# SPDX-License-Identifier: Apache-2.0
"""A copy of the project that may be changed, and its way back into the project."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stack.core.cache import atomic_file
from stack.core.errors import EnvironmentProblem, command
from stack.core.files import linked, links_below
from stack.core.fingerprint import folder_files
from stack.core.project import RELEASES_FILE, Project
from stack.series.order import ORDER
from stack.series.recorded import TREES


@dataclass(frozen=True)
class StaleFile:
    """A file of the project that differs from the commits.

    `path` is relative to the project's root.
    """

    path: Path
    kind: Literal["new", "changed", "removed"]


def require_writable(project: Project) -> None:
    """Require that the folders that `save` may change can be written.

    Raises:
        EnvironmentProblem: one cannot, as in a checkout that is mounted read-only.
    """
    for folder in (project.patches, project.overlay, project.kernels):
        place = folder if folder.is_dir() else project.root
        if not os.access(place, os.W_OK):
            raise EnvironmentProblem(
                "nothing was changed: the checkout cannot be written, or is read-only",
                path=place,
                hint=f"{command('cp', '-r', project.root, 'COPY')}, then the same"
                " command in COPY",
            )


def stage(project: Project, scratch: Path) -> Project:
    """A copy of the folders that `save` may change; it changes the copy first.

    Raises:
        SeriesError: there is a link in them.
    """
    for folder in (project.patches, project.overlay, project.kernels):
        for link in links_below(folder):
            raise linked(link)
    staged = Project(scratch)
    shutil.copyfile(project.releases_file, scratch / RELEASES_FILE)
    for source in (project.patches, project.overlay, project.kernels):
        if source.is_dir():
            shutil.copytree(
                source,
                scratch / source.relative_to(project.root),
                ignore=shutil.ignore_patterns("__pycache__"),
            )
    return staged


def compare(project: Project, staged: Project) -> list[StaleFile]:
    """The files of a project that differ from those of its changed copy, sorted."""
    stale = []
    for folder in (project.patches, project.overlay, project.kernels):
        before, after = folder_files(folder), folder_files(staged.root / folder.name)
        for name in sorted(before.keys() | after.keys()):
            if name not in after:
                stale.append(StaleFile(Path(name), "removed"))
            elif name not in before:
                stale.append(StaleFile(Path(name), "new"))
            elif before[name].read_bytes() != after[name].read_bytes():
                stale.append(StaleFile(Path(name), "changed"))
    return stale


def write(project: Project, staged: Project, stale: list[StaleFile]) -> None:
    """Change the project to the staged state: the recorded trees first, which then
    refuse what is half written, then new content, then the order files. Files are
    removed last, with folders that are then empty, so that a kill in between loses
    nothing."""

    def turn(file: StaleFile) -> tuple[int, Path]:
        name = file.path.name
        return (0 if name == TREES else 2 if name == ORDER else 1), file.path

    for file in sorted(stale, key=turn):
        target = project.root / file.path
        if file.kind == "removed":
            continue
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        with atomic_file(target) as output:
            output.write((staged.root / file.path).read_bytes())
        target.chmod(mode)
    for file in stale:
        if file.kind == "removed":
            (project.root / file.path).unlink()
            for folder in file.path.parents:
                # The first that holds something ends this.
                with contextlib.suppress(OSError):
                    (project.root / folder).rmdir()
