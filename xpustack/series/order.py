# SPDX-License-Identifier: Apache-2.0
"""The order file of a release, and how steps and their patches are called.

`patches/<release>/series` names one patch a line, oldest first; quilt reads it too.
"""

import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from xpustack.core.errors import SeriesError, UsageError
from xpustack.core.files import read_file
from xpustack.core.project import Project

ORDER = "series"
SUFFIX = ".patch"
SLUG = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
BASE_ALONE = "base"
"""Stands for the tree without steps where a step's slug is asked for."""


def read_order(project: Project, release: str) -> list[str]:
    """The slugs of a release, oldest first; empty if it has no series yet.

    Raises:
        SeriesError: a line is not `<slug>.patch`, stands twice, or the file does
            not end with LF, or is no plain file.
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
        slug = line.removesuffix(SUFFIX)
        if slug + SUFFIX != line or not SLUG.fullmatch(slug):
            problem = f"{line!r} is not a patch name such as swa-rope.patch"
        elif slug == BASE_ALONE:
            problem = f"{line!r}: {slug} stands for the tree without steps"
        elif slug in slugs:
            problem = f"{line} stands twice"
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


def format_order(slugs: Sequence[str]) -> bytes:
    """The order file of the given slugs."""
    return "".join(f"{slug}{SUFFIX}\n" for slug in slugs).encode()


def position(slugs: Sequence[str], slug: str, release: str) -> int:
    """How many steps the series has up to and with `slug`; 0 for `base`.

    Raises:
        UsageError: as `require_step`.
    """
    if slug == BASE_ALONE:
        return 0
    require_step(slugs, slug, release)
    return slugs.index(slug) + 1


def require_step(slugs: Sequence[str], slug: str, release: str) -> None:
    """Insist that a release's series has a step.

    Raises:
        UsageError: it has not; the nearest is suggested.
    """
    if slug in slugs:
        return
    near = difflib.get_close_matches(slug, slugs, n=1, cutoff=0.4)
    raise UsageError(
        f"the series has no step {slug!r}"
        + (f"; did you mean {near[0]}?" if near else ""),
        release=release,
        detail=[f"steps: {', '.join(slugs) or 'none'}"],
        hint="xpustack status",
    )


def redo(release: str, path: Path) -> str:
    """What to do about a step whose patch cannot be read or does not fit: the steps
    before it can still be applied, and the step made anew on top of them."""
    slug = path.name.removesuffix(SUFFIX)
    try:
        order = (path.parent / ORDER).read_text("utf-8", "replace").splitlines()
    except OSError:
        order = []
    at = order.index(path.name) if path.name in order else 0
    before = order[at - 1].removesuffix(SUFFIX) if at else BASE_ALONE
    return (
        f"git checkout -- {shlex.quote(str(path))} takes back an edit of the file;"
        f" else xpustack apply {release} --upto {before} --to DIR, commit the change"
        f" there with the step's message and the line `Step: {slug}`,"
        " xpustack save DIR"
    )
