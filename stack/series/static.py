# SPDX-License-Identifier: Apache-2.0
"""Checks the series without a base: no checkout, no network."""

import shlex
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from stack.base import releases
from stack.base.releases import Release
from stack.core.errors import SeriesError, StackError
from stack.core.files import linked, links_below
from stack.core.project import Project
from stack.series.order import ORDER, SLUG, read_patches, redo, unnamed
from stack.series.overlay import COMMON, NewFile, NewFiles
from stack.series.patch import read_patch, step_problems
from stack.series.recorded import TREES, read_trees, rederive_command
from stack.series.revision import require_recorded
from stack.series.tree import KERNEL_HOME, Step

LARGE = 500
"""Above this many changed lines outside kernels and tests, upstream asks for an
RFC."""


class Advice(SeriesError):
    """What a person should look at, and may leave."""


def check_static(project: Project) -> list[StackError]:
    """What is wrong in the series of a project, and `Advice`. What concerns the whole
    repository has no step."""
    return list(_problems(project))


def _problems(project: Project) -> Iterator[StackError]:
    try:
        pinned = releases.load(project)
    except StackError as error:
        yield error
        return
    names = pinned.names
    used: set[Path] = set()
    for release in pinned:
        for problem in _series(project, release, used):
            problem.release = problem.release or release.name
            yield problem
    folders = [path for path in project.patches.glob("*") if path.is_dir()]
    steps = [path.name for path in folders if SLUG.fullmatch(path.name)]
    yield from _strays(
        project.patches, (*names, *steps), "a series of no pinned release"
    )
    for path in unnamed(project):
        yield SeriesError(
            "no series names the patch",
            step=path.parent.name,
            path=path,
            hint=f"rm {shlex.quote(str(path))}, or name it in the {ORDER} of a release",
        )
    yield from _strays(
        project.overlay, (*names, COMMON), "an overlay of no pinned release"
    )
    for folder in (project.patches, project.overlay, project.kernels):
        for path in links_below(folder):
            link = linked(path)
            link.release = _release_of(project, path, names)
            yield link
    for path in sorted(project.overlay.rglob("*")):
        if path.is_file() and not path.is_symlink() and path not in used:
            yield SeriesError(
                "no step brings the overlay file",
                release=_release_of(project, path, names),
                path=path,
                hint=f"rm {shlex.quote(str(path))}, or name it in an Overlay: trailer",
            )


def unrecorded(project: Project) -> list[str]:
    """A note for each release whose revision has no recorded digest yet.

    Raises:
        StackError: the pins cannot be read.
    """
    return [
        f"{release.name}: revision {release.revision}: no digest recorded"
        f" (xpustack stamp {release.name})"
        for release in releases.load(project)
        if not release.content
    ]


def changed_lines(step: Step) -> int:
    """How many lines a step's diff adds and removes, without tests."""
    return sum(file.changed for file in step.files if not _is_test(file.path))


def new_file_lines(files: Mapping[str, NewFile]) -> int:
    """How many lines the new files of a step have, without kernels and tests."""
    return sum(
        file.content.count(b"\n")
        for path, file in files.items()
        if not path.startswith(KERNEL_HOME + "/") and not _is_test(path)
    )


def _series(project: Project, pin: Release, used: set[Path]) -> Iterator[StackError]:
    """The problems of a release; `used` gets the overlay files that its steps bring."""
    directory = project.series_dir(pin.name)
    try:
        patches = read_patches(project, pin.name)
        recorded = list(read_trees(project, pin.name))
    except StackError as error:
        yield error
        return
    for path in sorted(directory.glob("*")):
        if path.name not in (ORDER, TREES):
            yield SeriesError(
                f"a release's folder holds {ORDER} and {TREES} alone: a patch lies in"
                " the folder of its step",
                path=path,
                hint=f"rm {shlex.quote(str(path))}",
            )
    if recorded != list(patches):
        yield SeriesError(
            "the recorded trees are not those of the series: a step was moved, added or"
            " dropped",
            step=next(a or b for a, b in zip_longest(patches, recorded) if a != b),
            path=directory / TREES,
            hint=f"git diff -- {shlex.quote(str(directory))} shows an edit; if it is"
            f" meant: {rederive_command([pin.name])}",
        )
    new_files, owners = NewFiles(project), dict[str, str]()
    steps: list[Step] = []
    broken = False
    for path in patches.values():
        problems: list[StackError] = []
        try:
            step = read_patch(pin.name, path)
            steps.append(step)
            problems += _patch(project, step)
            problems += _owned_already(step, owners)
            problems += _brought(step, new_files, used)
        except StackError as error:
            problems.append(error)
        for problem in problems:
            broken = broken or not isinstance(problem, Advice)
            problem.step = problem.step or path.parent.name
            problem.path = problem.path or str(path)
            problem.hint = problem.hint or redo(pin.name, path)
        yield from problems
    # A series with an error has no content to compare.
    if not broken:
        try:
            require_recorded(project, pin, steps)
        except StackError as error:
            yield error


def _patch(project: Project, step: Step) -> Iterator[SeriesError]:
    """What is wrong with a patch by itself."""
    trailers = step.trailers
    for problem in step_problems(step):
        yield SeriesError(problem, hint=f"correct it in {step.path}")
    for line in step.message.splitlines():
        if line.startswith("#"):
            yield SeriesError(
                f"the message has the line {line!r}, which git takes for a comment and"
                " drops when the commit is edited",
                hint=f"let no line of the message in {step.path} begin with #",
            )
    if trailers.test and not (project.root / trailers.test).is_file():
        hint = f"create {trailers.test}"
        yield SeriesError(f"there is no {trailers.test}", hint=hint)
    if not step.diff and not trailers.overlay and not trailers.kernels:
        yield SeriesError("the step changes nothing and brings nothing")


def _owned_already(step: Step, owners: dict[str, str]) -> Iterator[SeriesError]:
    """What the step names although a step owns it."""
    names = [f"overlay file {name}" for name in step.trailers.overlay]
    for name in [*names, *(f"kernel {name}" for name in step.trailers.kernels)]:
        if name in owners:
            yield SeriesError(
                f"the {name} already belongs to {owners[name]}",
                hint=f"take it out of the trailers in {step.path}",
            )
        owners.setdefault(name, step.slug)


def _brought(step: Step, new_files: NewFiles, used: set[Path]) -> Iterator[SeriesError]:
    """What is wrong with the files that a step brings, and its size."""
    files = new_files.of(step)
    for new_file in files.values():
        used.add(new_file.source)
        if b"\r" in new_file.content:
            yield SeriesError(
                "the file has carriage returns: lines end with LF alone",
                path=new_file.source,
                hint=f"sed -i 's/\\r$//' {shlex.quote(str(new_file.source))}",
            )
    lines = changed_lines(step) + new_file_lines(files)
    if not step.trailers.stays and lines > LARGE:
        yield Advice(
            f"{lines} changed lines outside kernels and tests, more than {LARGE}:"
            " upstream asks for an RFC",
            hint="split the step: CONTRIBUTING.md",
        )


def _strays(parent: Path, names: tuple[str, ...], problem: str) -> Iterator[StackError]:
    for path in sorted(parent.glob("*")):
        if path.name not in names:
            place = shlex.quote(str(path))
            yield SeriesError(
                problem, path=path, hint=f"rm -r {place}, or xpustack pin VERSION"
            )


def _release_of(project: Project, path: Path, names: tuple[str, ...]) -> str | None:
    """The release in whose folder of patches or overlay a file is, if in any."""
    folders = path.relative_to(project.root).parts[1:2]
    return folders[0] if folders and folders[0] in names else None


def _is_test(path: str) -> bool:
    return path.startswith("tests/")
