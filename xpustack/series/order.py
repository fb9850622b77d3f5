# SPDX-License-Identifier: Apache-2.0
"""The order file of a release, and the names of steps and their patches.

`patches/<release>/series` lists one patch per line, oldest first; quilt can read it.
Blank lines, and lines that begin with `#`, are for people.
"""

import difflib
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from xpustack.core.errors import SeriesError, UsageError
from xpustack.core.files import read_file
from xpustack.core.history import tracked
from xpustack.core.project import Project

ORDER = "series"
SUFFIX = ".patch"
SLUG = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
BASE_ALONE = "base"
"""Means the tree without steps, where a command takes a step's slug."""


def read_order(project: Project, release: str) -> list[str]:
    """The slugs of a release, oldest first; empty if it has no series yet.

    Raises:
        SeriesError: a line is not `<slug>.patch` or occurs twice, or the file does
            not end with LF or is no plain file.
        EnvironmentProblem: the file cannot be read.
    """
    path = project.series_dir(release) / ORDER
    try:
        content = read_file(path, project.root, SeriesError, release=release)
    except FileNotFoundError:
        return []
    text = content.decode("utf-8", "replace")
    slugs: list[str] = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if _for_people(line):
            continue
        slug = line.removesuffix(SUFFIX)
        if slug + SUFFIX != line or not SLUG.fullmatch(slug):
            problem = f"{line!r} is not a patch name such as swa-rope.patch"
        elif slug == BASE_ALONE:
            problem = f"{line!r}: {slug} means the tree without steps"
        elif slug in slugs:
            problem = f"{line} is listed twice"
        else:
            slugs.append(slug)
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
    return slugs


def format_order(slugs: Sequence[str], before: bytes = b"") -> bytes:
    """The order file of the given slugs.

    Args:
        before: the order file so far. What it has for people above a line stays there,
            and goes when the line goes; what follows the last line stays last.
    """
    notes: dict[str, str] = {}
    held = ""
    for line in before.decode("utf-8", "replace").splitlines(keepends=True):
        if _for_people(line):
            held += line
        else:
            notes[line.rstrip("\n")], held = held, ""
    names = [slug + SUFFIX for slug in slugs]
    lines = [f"{notes.get(name, '')}{name}\n" for name in names]
    return ("".join(lines) + held).encode()


def _for_people(line: str) -> bool:
    """Whether a line of an order file is blank or a comment."""
    return not line.strip(" \t\n") or line.startswith("#")


def unlisted(project: Project, release: str, slugs: Collection[str]) -> list[Path]:
    """The files in the folder of a release that its series, the given slugs, does not
    name."""
    named = {ORDER, *(slug + SUFFIX for slug in slugs)}
    files = project.series_dir(release).glob("*")
    return sorted(path for path in files if path.name not in named)


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
    )


def redo(release: str, path: Path) -> str:
    """The hint for a step whose patch cannot be read or does not fit: apply the steps
    before it, and make the step again on top of them. A patch that git does not know
    cannot be taken back."""
    slug, order_file = path.name.removesuffix(SUFFIX), path.parent / ORDER
    if tracked(Project(path.parents[2]), path):
        first = f"git checkout -- {shlex.quote(str(path))} takes back an edit; else "
    elif not path.exists():
        first = f"take its line out of {order_file}; or "
    else:
        first = ""
    try:
        order = order_file.read_text("utf-8", "replace").splitlines()
    except OSError:
        order = []
    index = order.index(path.name) if path.name in order else 0
    before = order[index - 1].removesuffix(SUFFIX) if index else BASE_ALONE
    return (
        f"{first}xpustack apply {release} --upto {before} --to DIR, commit the change"
        f" there with the step's message and the line `Step: {slug}`,"
        " xpustack save DIR"
    )
