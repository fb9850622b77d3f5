# SPDX-License-Identifier: Apache-2.0
"""The order file of a release, and the names of steps and their patches.

`patches/<release>/series` lists one patch per line, oldest first, such as
`swa-rope/v0.22.1.patch` for `patches/swa-rope/v0.22.1.patch`: the variant of the step
`swa-rope` that is called after the first release that uses it. quilt reads the file
with `QUILT_PATCHES=patches QUILT_SERIES=patches/<release>/series`. Blank lines, and
lines that begin with `#`, are for people.
"""

import contextlib
import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from stack.core.errors import SeriesError, UsageError, concerning, meant
from stack.core.files import read_file
from stack.core.git import Git
from stack.core.project import Project

ORDER = "series"
SUFFIX = ".patch"
SLUG = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
BASE_ALONE = "base"
"""Means the tree without steps, where a command takes a step's slug."""
_LINE = re.compile(rf"({SLUG.pattern})/(v[0-9][A-Za-z0-9.+!_-]*){re.escape(SUFFIX)}")


def read_order(project: Project, release: str) -> list[str]:
    """The slugs of a release, oldest first; empty if it has no series yet.

    Raises:
        SeriesError: as `read_patches`.
    """
    return list(read_patches(project, release))


def read_patches(project: Project, release: str) -> dict[str, Path]:
    """The patch of each step of a release, by slug, oldest first.

    Raises:
        SeriesError: a line is not `<slug>/<release>.patch`, or names a step twice, or
            the file does not end with LF or is no plain file.
        EnvironmentProblem: the file cannot be read.
    """
    path = project.series_dir(release) / ORDER
    try:
        with concerning(release):
            text = read_file(path, project.root).decode("utf-8", "replace")
    except FileNotFoundError:
        return {}
    patches: dict[str, Path] = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if _for_people(line):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            problem = f"{line!r} is not a patch name such as swa-rope/v0.22.1.patch"
        elif match[1] == BASE_ALONE:
            problem = f"{line!r}: {BASE_ALONE} means the tree without steps"
        elif match[1] in patches:
            problem = f"the step {match[1]} is listed twice"
        else:
            patches[match[1]] = project.patches / line
            continue
        raise SeriesError(
            problem,
            release=release,
            path=f"{path}:{number}",
            hint=f"correct line {number} of {path}",
        )
    if text and not text.endswith("\n"):
        raise SeriesError(
            "the last line does not end with a line feed",
            release=release,
            path=path,
            hint=f"echo >> {shlex.quote(str(path))}",
        )
    return patches


def format_order(patches: Iterable[Path], before: bytes = b"") -> bytes:
    """The order file of the given patches.

    Args:
        before: the order file so far. What it has for people above a step's line stays
            there, and goes when the step goes; what follows the last line stays last.
    """
    notes: dict[str, str] = {}
    held = ""
    for line in before.decode("utf-8", "replace").splitlines(keepends=True):
        if _for_people(line):
            held += line
        else:
            notes[line.partition("/")[0]], held = held, ""
    lines = [
        f"{notes.get(path.parent.name, '')}{path.parent.name}/{path.name}\n"
        for path in patches
    ]
    return ("".join(lines) + held).encode()


def _for_people(line: str) -> bool:
    """Whether a line of an order file is blank or a comment."""
    return not line.strip(" \t\n") or line.startswith("#")


def users(patch: Path) -> list[str]:
    """The releases whose series name a patch, oldest first; a malformed series counts
    by the lines that can be read."""
    line = f"{patch.parent.name}/{patch.name}"
    orders = _orders(Project(patch.parents[2]))
    names = (release for release, lines in orders.items() if line in lines)
    return sorted(names, key=_age)


def unnamed(project: Project) -> list[Path]:
    """The files in the folders of steps that no series names, sorted."""
    named = set().union(*_orders(project).values())
    files = project.patches.glob("*/*" + SUFFIX)
    return sorted(
        path for path in files if f"{path.parent.name}/{path.name}" not in named
    )


def _orders(project: Project) -> dict[str, set[str]]:
    """The lines of every order file that can be read, by release."""
    orders: dict[str, set[str]] = {}
    for order in project.patches.glob(f"*/{ORDER}"):
        with contextlib.suppress(OSError):
            text = order.read_text("utf-8", "replace")
            orders[order.parent.name] = set(text.split("\n"))
    return orders


def _age(release: str) -> tuple[Version, str]:
    try:
        return Version(release), release
    except InvalidVersion:
        return Version("0"), release


def position(slugs: Sequence[str], slug: str, release: str) -> int:
    """How many steps the series has up to and including `slug`; 0 for `base`.

    Raises:
        UsageError: as `require_step`.
    """
    if slug == BASE_ALONE:
        return 0
    require_step(slugs, slug, release)
    return slugs.index(slug) + 1


def require_step(slugs: Sequence[str], slug: str, release: str) -> None:
    """Require that a release's series has a step.

    Raises:
        UsageError: it has no such step; the nearest slug is suggested.
    """
    if slug in slugs:
        return
    matches = difflib.get_close_matches(slug, slugs, n=1, cutoff=0.4)
    raise UsageError(
        f"the series has no step {slug!r}"
        + (f"; did you mean {matches[0]}?" if matches else ""),
        release=release,
        detail=[f"steps: {', '.join(slugs) or 'none'}"],
        hint="xpustack status",
        again=meant(slug, matches[0]) if matches else None,
    )


@contextlib.contextmanager
def blaming(release: str, patch: Path) -> Iterator[None]:
    """Add to errors of the block what they do not say: the step that has the patch, its
    file, and how the step is made again."""
    try:
        with concerning(release, patch.parent.name):
            yield
    except SeriesError as error:
        error.path = error.path or str(patch)
        error.hint = error.hint or redo(release, patch)
        raise


def redo(release: str, path: Path) -> str:
    """The hint for a step whose patch cannot be read or does not fit: apply the steps
    before it, and make the step again on top of them. A patch that git does not know
    cannot be taken back."""
    project, slug = Project(path.parents[2]), path.parent.name
    order = project.series_dir(release) / ORDER
    if Git(project.root / ".git", work_tree=project.root).tracks(path):
        first = f"git checkout -- {shlex.quote(str(path))} takes back an edit; else "
    elif not path.exists():
        first = f"take its line out of {order}; or "
    else:
        first = ""
    try:
        lines = order.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    steps = [line.partition("/")[0] for line in lines if _LINE.fullmatch(line)]
    index = steps.index(slug) if slug in steps else 0
    before = steps[index - 1] if index else BASE_ALONE
    return (
        f"{first}xpustack apply {release} --upto {before} --to DIR, commit the change"
        f" there with the step's message and the line `Step: {slug}`,"
        " xpustack save DIR"
    )
