# SPDX-License-Identifier: Apache-2.0
"""Takes a release out of the stack, with all that it alone used. What is removed stays
in git's history, and the pins say where."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from stack.base import releases
from stack.base.pin import without_entry
from stack.base.releases import Release, Retired
from stack.core import history
from stack.core.cache import Cache, atomic_file
from stack.core.errors import UsageError, command
from stack.core.project import Project
from stack.core.rows import csv_text, read_rows
from stack.series.order import unnamed
from stack.series.overlay import COMMON, kernel_closure, kernel_package
from stack.series.patch import load_series
from stack.series.sharing import read_texts, write_texts
from stack.series.staging import StaleFile, compare, stage, write
from stack.series.tree import Step

DATA = "docs/data"
RELEASE = "release"
"""The column of a file of rows that names the release of a row."""
_KERNEL_PLACES = ("kernels/reference/{0}/{1}.py", "tests/kernels/{0}/test_{1}.py")


def retire(project: Project, cache: Cache, names: Iterable[str]) -> list[StaleFile]:
    """Remove releases: their series, and the patches, overlay files, kernels, tests, op
    schemas and rows that no other release uses. `releases.toml` keeps the commit that
    has them.

    Returns:
        The files that changed, sorted.

    Raises:
        UsageError: there is no such pin, it is the newest one, or files of the checkout
            are not committed.
        SeriesError: a series cannot be read.
    """
    pinned = releases.load(project)
    leaving = [pinned[name] for name in dict.fromkeys(names)]
    if pinned.newest in leaving:
        raise UsageError(
            "the newest release cannot be retired: the next one is carried from it",
            release=pinned.newest.name,
            hint="xpustack status",
        )
    commit = _committed(project)
    others = [other for other in pinned if other not in leaving]
    own, used = (
        [step for release in some for step in load_series(project, release.name)]
        for some in (leaving, others)
    )
    with cache.scratch() as scratch:
        staged = stage(project, scratch)
        _without_series(staged, leaving, others)
        _without_files(staged, leaving, own, used)
        stale = compare(project, staged)
        rows = dict(_rows_without(project, {release.name for release in leaving}))
        alone = _tests_of(own) - _tests_of(used)
        alone |= _schemas(project, leaving) - _schemas(project, others)
        gone = [
            path
            for path in alone | _beside(project, stale)
            if (project.root / path).is_file()
        ]
        pins = project.releases_file.read_text("utf-8")
        for release in leaving:
            pins = without_entry(pins, Retired(release.version, commit))
        releases.parse_releases(pins, project.releases_file)
        rows[project.releases_file] = pins
        # The pins first: what they do not name, no command looks at.
        for path, text in reversed(rows.items()):
            with atomic_file(path) as file:
                file.write(text.encode())
        write(project, staged, stale)
        for path in gone:
            (project.root / path).unlink()
    changed = [StaleFile(path.relative_to(project.root), "changed") for path in rows]
    removed = [StaleFile(path, "removed") for path in gone]
    return sorted([*stale, *changed, *removed], key=lambda file: file.path)


def _committed(project: Project) -> str:
    """The commit that is checked out, which has the files as they are.

    Raises:
        UsageError: this is no git checkout, or a file differs from the commit.
    """
    commit, differing = history.head(project), history.differing(project)
    if not commit or differing:
        raise UsageError(
            "a release is retired as of the last commit, and files differ from that"
            if commit
            else "a release is retired to git's history, and this is no git checkout",
            path=project.root,
            detail=differing[:10],
            hint=command("git", "-C", project.root, "status"),
        )
    return commit


def _without_series(
    staged: Project, leaving: list[Release], others: list[Release]
) -> None:
    """Remove series, and the patches that no other series names; the others' patches
    are called after the first release that uses them."""
    strays = set(unnamed(staged))
    texts = read_texts(staged, [other.name for other in others])
    for release in leaving:
        shutil.rmtree(staged.series_dir(release.name), ignore_errors=True)
    write_texts(staged, texts)
    for path in set(unnamed(staged)) - strays:
        path.unlink()
    for folder in staged.patches.iterdir():
        # `request.md` goes with the last variant.
        if folder.is_dir() and not any(
            path.suffix == ".patch" or path.name == "series"
            for path in folder.iterdir()
        ):
            shutil.rmtree(folder)


def _without_files(
    staged: Project, leaving: list[Release], own: list[Step], used: list[Step]
) -> None:
    """Remove the overlay files and kernels that only steps of these releases bring."""
    for release in leaving:
        shutil.rmtree(staged.overlay / release.name, ignore_errors=True)
    kept = {path for step in used for path in step.trailers.overlay}
    for step in own:
        for path in set(step.trailers.overlay) - kept:
            (staged.overlay / COMMON / path).unlink(missing_ok=True)
    brought, needed = (
        {name for step in steps for name in kernel_closure(staged, step)}
        for steps in (own, used)
    )
    for name in brought - needed:
        (kernel_package(staged) / name).unlink()


def _tests_of(steps: Iterable[Step]) -> set[Path]:
    return {Path(step.trailers.test) for step in steps if step.trailers.test}


def _schemas(project: Project, some: Iterable[Release]) -> set[Path]:
    """The op schemas of the kernels that releases pin."""
    folder = project.emulation.relative_to(project.root) / "emulated_xpu/schemas"
    return {folder / f"{each.xpu_kernels.version}.txt" for each in some}


def _beside(project: Project, stale: Iterable[StaleFile]) -> set[Path]:
    """The reference and the test of each kernel that is removed."""
    package = kernel_package(project).relative_to(project.root)
    kernels = [
        file.path.relative_to(package)
        for file in stale
        if file.kind == "removed" and file.path.is_relative_to(package)
    ]
    return {
        Path(place.format(kernel.parent, kernel.stem))
        for kernel in kernels
        for place in _KERNEL_PLACES
    }


def _rows_without(project: Project, names: set[str]) -> Iterator[tuple[Path, str]]:
    """The text of each file of rows that has rows of the releases, without them."""
    for path in sorted((project.root / DATA).glob("*.csv")):
        rows = read_rows(path)
        kept = [row for row in rows if row.get(RELEASE) not in names]
        if len(kept) < len(rows):
            yield path, csv_text(kept, tuple(rows[0]))
