# SPDX-License-Identifier: Apache-2.0
"""What can be judged about the series without a base: no checkout, no network."""

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from xpustack.base import releases
from xpustack.core.errors import StackError
from xpustack.core.files import links_below, without_link
from xpustack.core.project import Project
from xpustack.series.apply import forbidden
from xpustack.series.diff import NO_BLOB
from xpustack.series.order import ORDER, SUFFIX, read_order, redo
from xpustack.series.overlay import COMMON, KERNEL_HOME, brought
from xpustack.series.patch import Step, read_patch, trailer_problems

LARGE = 500
"""Changed lines outside kernels and tests beyond which upstream asks for an RFC."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, about a series.

    Attributes:
        path: the file to look at, `<file>:<line>` where known.
        hint: the next command to run.
        warning: it does not fail the check.
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


def check_static(project: Project) -> list[Finding]:
    """Judge every series of a project.

    Returns:
        The findings; those that are no `warning` are errors. A finding about a
        repository-wide matter has no step.
    """
    try:
        names = releases.load(project).names
    except StackError as error:
        return [_finding(error, None)]
    findings: list[Finding] = []
    used: set[Path] = set()
    for name in names:
        findings += _series(project, name, used)
    findings += _folders(project.patches, names, "a series of no pinned release")
    findings += _folders(
        project.overlay, (*names, COMMON), "an overlay of no pinned release"
    )
    for folder in (project.patches, project.overlay, project.kernels):
        for link in links_below(folder):
            findings.append(
                Finding(
                    _release_of(project, link, names),
                    None,
                    str(link),
                    "a symbolic link stands there, and links are not followed",
                    hint=without_link(link),
                )
            )
    for path in sorted(project.overlay.rglob("*")):
        if path.is_file() and not path.is_symlink() and path not in used:
            findings.append(
                Finding(
                    _release_of(project, path, names),
                    None,
                    str(path),
                    "the overlay file is brought by no step",
                    hint=f"rm {shlex.quote(str(path))}, or name it in an Overlay:"
                    " trailer",
                )
            )
    return findings


def changed_lines(step: Step) -> int:
    """Lines that a step's diff adds and removes, tests left out."""
    return sum(file.changed for file in step.files if not _is_test(file.path))


def brought_lines(project: Project, before: list[Step], step: Step) -> int:
    """Lines of the files that a step brings, kernels and tests left out.

    Raises:
        SeriesError: as `brought`.
    """
    return sum(
        file.content.count(b"\n")
        for path, file in brought(project, before, step).items()
        if not path.startswith(KERNEL_HOME + "/") and not _is_test(path)
    )


def _series(project: Project, release: str, used: set[Path]) -> Iterator[Finding]:
    directory = project.series_dir(release)
    try:
        slugs = read_order(project, release)
    except StackError as error:
        yield _finding(error, release)
        return
    for path in sorted(directory.glob("*")):
        if path.name != ORDER and path.name.removesuffix(SUFFIX) not in slugs:
            yield Finding(
                release,
                path.name.removesuffix(SUFFIX),
                str(path),
                "the file is not in the series",
                hint=f"rm {shlex.quote(str(path))}, or add its name to"
                f" {directory / ORDER}",
            )
    seen = _Seen(project, used)
    for slug in slugs:
        try:
            step = read_patch(release, directory / (slug + SUFFIX))
        except StackError as error:
            yield _finding(error, release)
            continue
        yield from _step(seen, step)
        seen.steps.append(step)


@dataclass
class _Seen:
    """What the steps of a series so far amount to.

    `owners` maps an overlay file or kernel to its step, `blobs` a path to the
    blob that the last step left there, `used` holds the overlay files read.
    """

    project: Project
    used: set[Path]
    steps: list[Step] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, str] = field(default_factory=dict)


def _step(seen: _Seen, step: Step) -> Iterator[Finding]:
    project = seen.project

    def finding(message: str, hint: str = "", *, warning: bool = False) -> Finding:
        return Finding(
            step.release,
            step.slug,
            str(step.path),
            message,
            hint or redo(step.release, step.path),
            warning,
        )

    for problem in trailer_problems(step):
        yield finding(problem, f"correct the trailer in {step.path}")
    trailers = step.trailers
    if trailers.test and not (project.root / trailers.test).is_file():
        yield finding(f"there is no {trailers.test}", f"create {trailers.test}")
    if not step.diff and not trailers.overlay and not trailers.kernels:
        yield finding("the step changes nothing and brings nothing")
    for file in step.files:
        if reason := forbidden(file.path):
            yield finding(f"{file.path}: {reason}")
        if file.creates:
            yield finding(
                f"{file.path}: a patch may not create a file: bring it as overlay"
            )
        if file.path.startswith(KERNEL_HOME + "/"):
            yield finding(f"{file.path}: kernels are changed in kernels/xpu_dsv4")
        known = seen.blobs.get(file.path, file.old_id)
        if file.old_id and known != file.old_id:
            yield finding(
                f"{file.path}: the patch was made on blob {file.old_id[:12]}, the steps"
                f" before leave {known[:12]}: the order is wrong or a step changed",
            )
        seen.blobs[file.path] = file.new_id or known
    names = [("overlay file", name) for name in trailers.overlay]
    names += [("kernel", name) for name in trailers.kernels]
    for kind, name in names:
        if name in seen.owners:
            yield finding(
                f"the {kind} {name} already belongs to {seen.owners[name]}",
                f"take it out of the trailers in {step.path}",
            )
        seen.owners.setdefault(name, step.slug)
    try:
        for path, comes in brought(project, seen.steps, step).items():
            seen.used.add(comes.source)
            if reason := forbidden(path):
                yield finding(f"{path}: {reason}")
            if seen.blobs.get(path, NO_BLOB) != NO_BLOB:
                yield finding(f"the tree already has {path}: patch it instead")
            seen.blobs[path] = _blob_id(comes.content)
            if b"\r" in comes.content:
                yield Finding(
                    step.release,
                    step.slug,
                    str(comes.source),
                    "the file has carriage returns: lines end with LF alone",
                    hint=f"sed -i 's/\\r$//' {shlex.quote(str(comes.source))}",
                )
        lines = changed_lines(step) + brought_lines(project, seen.steps, step)
        if lines > LARGE:
            yield finding(
                f"{lines} changed lines outside kernels and tests, more than {LARGE}:"
                " upstream asks for an RFC",
                "split the step: CONTRIBUTING.md",
                warning=True,
            )
    except StackError as error:
        yield _finding(error, step.release)


def _folders(parent: Path, names: tuple[str, ...], problem: str) -> Iterator[Finding]:
    for path in sorted(parent.glob("*")):
        if path.name not in names:
            yield Finding(
                None,
                None,
                str(path),
                problem,
                hint=f"rm -r {shlex.quote(str(path))}, or xpustack pin VERSION",
            )


def _release_of(project: Project, path: Path, names: tuple[str, ...]) -> str | None:
    """The release in whose folder of patches or overlay a file is, if in any."""
    folders = path.relative_to(project.root).parts[1:2]
    return folders[0] if folders and folders[0] in names else None


def _is_test(path: str) -> bool:
    return path.startswith("tests/")


def _blob_id(content: bytes) -> str:
    """The id that git gives to a blob."""
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def _finding(error: StackError, release: str | None) -> Finding:
    message = "; ".join([error.message, *error.detail])
    return Finding(
        error.release or release,
        error.step,
        error.path or "",
        message,
        error.hint or "xpustack check --static",
    )
