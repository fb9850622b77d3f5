# SPDX-License-Identifier: Apache-2.0
"""The trees that a release's series must give: `patches/<release>/trees`.

A line is a slug and the id of the tree after that step, as `git rev-parse` prints it.
A patch that several releases share may fit with moved lines; the recorded id says that
it gave what it gave when the step was saved.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from stack.core.errors import ApplyError, SeriesError, concerning
from stack.core.files import read_file
from stack.core.project import Project
from stack.series.order import SLUG, users
from stack.series.tree import Step, StepTree

TREES = "trees"
_LINE = re.compile(rf"({SLUG.pattern}) ([0-9a-f]{{40}})")


def trees_file(project: Project, release: str) -> Path:
    """The file of a release's recorded trees."""
    return project.series_dir(release) / TREES


def read_trees(project: Project, release: str) -> dict[str, str]:
    """The recorded id of the tree after each step, by slug, in the series' order; empty
    if none is recorded.

    Raises:
        SeriesError: a line is malformed.
        EnvironmentProblem: the file cannot be read.
    """
    path = trees_file(project, release)
    try:
        with concerning(release):
            lines = read_file(path, project.root).decode("utf-8", "replace")
    except FileNotFoundError:
        return {}
    recorded: dict[str, str] = {}
    for number, line in enumerate(lines.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None or match[1] in recorded:
            raise SeriesError(
                f"{line!r} is not one step and the id of its tree",
                release=release,
                path=f"{path}:{number}",
                hint=rederive_command([release]),
            )
        recorded[match[1]] = match[2]
    return recorded


def format_trees(trees: Iterable[StepTree]) -> bytes:
    """The file of the given trees, oldest first."""
    return "".join(f"{tree.slug} {tree.tree_id}\n" for tree in trees).encode()


def rederive_command(releases: Iterable[str]) -> str:
    """The command that records the trees of some releases again."""
    return "xpustack rederive " + " ".join(releases)


def require_recorded_tree(
    project: Project, step: Step, tree_id: str, recorded: Mapping[str, str]
) -> None:
    """Require that a step gave the recorded tree.

    Raises:
        ApplyError: it gave another one, or none is recorded. The error names the
            releases that share the patch, and the command that records anew.
    """
    expected = recorded.get(step.slug)
    if expected == tree_id:
        return
    sharing = users(step.path)
    folders = [project.patches / step.slug, project.overlay, project.kernels]
    places = " ".join(shlex.quote(str(folder)) for folder in folders)
    message = (
        "the step does not give the tree that is recorded: a patch, an overlay file, a"
        " kernel or the order of the steps changed"
        if expected
        else "no tree is recorded for the step"
    )
    raise ApplyError(
        message,
        detail=[
            f"recorded in {trees_file(project, step.release)}: {expected or 'none'}",
            f"now: {tree_id}",
            f"the patch is that of {', '.join(sharing)}",
        ],
        hint=f"git diff -- {places} shows an edit; if it is meant:"
        f" {rederive_command(sharing)}",
    )
