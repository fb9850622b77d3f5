# SPDX-License-Identifier: Apache-2.0
"""Checks the series without a base: no checkout, no network."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from xpustack.base import releases
from xpustack.base.releases import Release
from xpustack.core.errors import StackError
from xpustack.core.files import links_below, without_link
from xpustack.core.project import Project
from xpustack.series.diff import forbidden
from xpustack.series.order import ORDER, SLUG, read_patches, redo, unnamed
from xpustack.series.overlay import COMMON, KERNEL_HOME, NewFile, NewFiles
from xpustack.series.patch import read_patch, trailer_problems
from xpustack.series.recorded import TREES, read_trees, rederive_command
from xpustack.series.revision import require_recorded
from xpustack.series.tree import Step

LARGE = 500
"""Above this many changed lines outside kernels and tests, upstream asks for an
RFC."""


@dataclass(frozen=True)
class SeriesProblem:
    """An error or a warning about a series.

    Attributes:
        path: the file to look at, `<file>:<line>` where known.
        hint: the next command to run.
        warning: the check passes nevertheless.
    """

    release: str | None
    step: str | None
    path: str
    message: str
    hint: str = "xpustack check --static"
    warning: bool = False

    def __str__(self) -> str:
        place = " ".join(part for part in (self.release, self.step) if part)
        word = "warning" if self.warning else "error"
        return f"{word}: {place}: {self.path}: {self.message} (next: {self.hint})"


def check_static(project: Project) -> list[SeriesProblem]:
    """Check every series of a project.

    Returns:
        Errors and warnings. One about the whole repository has no step.
    """
    try:
        pinned = releases.load(project)
    except StackError as error:
        return [_problem(error, None)]
    names = pinned.names
    problems: list[SeriesProblem] = []
    used: set[Path] = set()
    for release in pinned:
        problems += _series(project, release, used)
    steps = [path.name for path in project.patches.glob("*") if _is_step(path)]
    problems += _folders(
        project.patches, (*names, *steps), "a series of no pinned release"
    )
    for path in unnamed(project):
        problems.append(
            SeriesProblem(
                None,
                path.parent.name,
                str(path),
                "no series names the patch",
                hint=f"rm {shlex.quote(str(path))}, or name it in the {ORDER} of a"
                " release",
            )
        )
    problems += _folders(
        project.overlay, (*names, COMMON), "an overlay of no pinned release"
    )
    for folder in (project.patches, project.overlay, project.kernels):
        for link in links_below(folder):
            problems.append(
                SeriesProblem(
                    _release_of(project, link, names),
                    None,
                    str(link),
                    "this is a symbolic link, and links are not followed",
                    hint=without_link(link),
                )
            )
    for path in sorted(project.overlay.rglob("*")):
        if path.is_file() and not path.is_symlink() and path not in used:
            problems.append(
                SeriesProblem(
                    _release_of(project, path, names),
                    None,
                    str(path),
                    "no step brings the overlay file",
                    hint=f"rm {shlex.quote(str(path))}, or name it in an Overlay:"
                    " trailer",
                )
            )
    return problems


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


def _series(project: Project, pin: Release, used: set[Path]) -> Iterator[SeriesProblem]:
    release = pin.name
    directory = project.series_dir(release)
    try:
        patches = read_patches(project, release)
        recorded = list(read_trees(project, release))
    except StackError as error:
        yield _problem(error, release)
        return
    for path in sorted(directory.glob("*")):
        if path.name not in (ORDER, TREES):
            yield SeriesProblem(
                release,
                None,
                str(path),
                f"a release's folder holds {ORDER} and {TREES} alone: a patch lies in"
                " the folder of its step",
                hint=f"rm {shlex.quote(str(path))}",
            )
    if recorded != list(patches):
        yield SeriesProblem(
            release,
            _first_difference(list(patches), recorded),
            str(directory / TREES),
            "the recorded trees are not those of the series: a step was moved, added or"
            " dropped",
            hint=f"git diff -- {shlex.quote(str(directory))} shows an edit; if it is"
            f" meant: {rederive_command([release])}",
        )
    state = _SeriesState(project, used, NewFiles(project))
    broken = False
    for path in patches.values():
        try:
            step = read_patch(release, path)
        except StackError as error:
            broken = True
            yield _problem(error, release)
            continue
        for problem in _step(state, step):
            broken = broken or not problem.warning
            yield problem
        state.steps.append(step)
    # A series with an error has no content to compare.
    if not broken:
        try:
            require_recorded(project, pin, state.steps)
        except StackError as error:
            yield _problem(error, release)


@dataclass
class _SeriesState:
    """The state of a series after some of its steps.

    `owners` maps an overlay file or kernel to its step; `used` holds the overlay files
    that steps name.
    """

    project: Project
    used: set[Path]
    new_files: NewFiles
    steps: list[Step] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)


def _step(state: _SeriesState, step: Step) -> Iterator[SeriesProblem]:
    project = state.project

    def report(message: str, hint: str = "", *, warning: bool = False) -> SeriesProblem:
        return SeriesProblem(
            step.release,
            step.slug,
            str(step.path),
            message,
            hint or redo(step.release, step.path),
            warning,
        )

    for problem in trailer_problems(step):
        yield report(problem, f"correct the trailer in {step.path}")
    for line in step.message.splitlines():
        if line.startswith("#"):
            yield report(
                f"the message has the line {line!r}, which git takes for a comment and"
                " drops when the commit is edited",
                f"let no line of the message in {step.path} begin with #",
            )
    trailers = step.trailers
    if trailers.test and not (project.root / trailers.test).is_file():
        yield report(f"there is no {trailers.test}", f"create {trailers.test}")
    if not step.diff and not trailers.overlay and not trailers.kernels:
        yield report("the step changes nothing and brings nothing")
    for file in step.files:
        if reason := forbidden(file.path):
            yield report(f"{file.path}: {reason}")
        if file.creates:
            yield report(
                f"{file.path}: a patch may not create a file: bring it as overlay"
            )
        if file.path.startswith(KERNEL_HOME + "/"):
            yield report(f"{file.path}: kernels are changed in kernels/xpu_dsv4")
    names = [("overlay file", name) for name in trailers.overlay]
    names += [("kernel", name) for name in trailers.kernels]
    for kind, name in names:
        if name in state.owners:
            yield report(
                f"the {kind} {name} already belongs to {state.owners[name]}",
                f"take it out of the trailers in {step.path}",
            )
        state.owners.setdefault(name, step.slug)
    try:
        files = state.new_files.of(step)
        for path, new_file in files.items():
            state.used.add(new_file.source)
            if reason := forbidden(path):
                yield report(f"{path}: {reason}")
            if b"\r" in new_file.content:
                yield SeriesProblem(
                    step.release,
                    step.slug,
                    str(new_file.source),
                    "the file has carriage returns: lines end with LF alone",
                    hint=f"sed -i 's/\\r$//' {shlex.quote(str(new_file.source))}",
                )
        lines = changed_lines(step) + new_file_lines(files)
        if lines > LARGE:
            yield report(
                f"{lines} changed lines outside kernels and tests, more than {LARGE}:"
                " upstream asks for an RFC",
                "split the step: CONTRIBUTING.md",
                warning=True,
            )
    except StackError as error:
        yield _problem(error, step.release)


def _folders(
    parent: Path, names: tuple[str, ...], problem: str
) -> Iterator[SeriesProblem]:
    for path in sorted(parent.glob("*")):
        if path.name not in names:
            yield SeriesProblem(
                None,
                None,
                str(path),
                problem,
                hint=f"rm -r {shlex.quote(str(path))}, or xpustack pin VERSION",
            )


def _is_step(folder: Path) -> bool:
    """Whether a folder of `patches/` is that of a step."""
    return bool(SLUG.fullmatch(folder.name)) and folder.is_dir()


def _release_of(project: Project, path: Path, names: tuple[str, ...]) -> str | None:
    """The release in whose folder of patches or overlay a file is, if in any."""
    folders = path.relative_to(project.root).parts[1:2]
    return folders[0] if folders and folders[0] in names else None


def _is_test(path: str) -> bool:
    return path.startswith("tests/")


def _first_difference(slugs: list[str], others: list[str]) -> str | None:
    """The first step at which two orders differ."""
    pairs = zip_longest(slugs, others)
    return next((slug or other for slug, other in pairs if slug != other), None)


def _problem(error: StackError, release: str | None) -> SeriesProblem:
    message = "; ".join([error.message, *error.detail])
    return SeriesProblem(
        error.release or release,
        error.step,
        error.path or "",
        message,
        error.hint or "xpustack check --static",
    )
