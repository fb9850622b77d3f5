# SPDX-License-Identifier: Apache-2.0
"""From the commits of a work repository back to patches, overlay and kernels.

Before anything is written, the result is applied again and must give the same trees
as the commits.
"""

import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xpustack.base import releases
from xpustack.base.store import Store
from xpustack.core.cache import Cache, atomic_file
from xpustack.core.errors import SeriesError, UsageError, relocated
from xpustack.core.files import links_below, without_link
from xpustack.core.progress import Progress, silent
from xpustack.core.project import RELEASES_FILE, Project
from xpustack.series.apply import trees
from xpustack.series.commits import StepCommit, commits_since, quoted, require_end
from xpustack.series.order import (
    ORDER,
    SUFFIX,
    format_order,
    position,
    read_order,
    require_step,
)
from xpustack.series.overlay import (
    COMMON,
    KERNEL_HOME,
    TRITON,
    TRITON_IN_VLLM,
    kernel_package,
)
from xpustack.series.patch import Step, format_patch, load_step
from xpustack.series.rederive import rederive
from xpustack.series.tree import Series
from xpustack.series.worktree import (
    Work,
    link_objects,
    open_work,
    pending,
    start_over,
)

_KERNEL_FILE = re.compile(r"[^/]+\.py|tuned/[^/]+\.json")
_LEGEND = (
    "D: the commit has it, no Kernels: trailer reaches it;"
    " A: the trailers bring it, the commit lacks it; M: they differ"
)


@dataclass(frozen=True)
class StaleFile:
    """A file of the project that differs from the commits.

    `path` is relative to the project's root.
    """

    path: Path
    kind: Literal["new", "changed", "removed"]


def save(
    project: Project,
    cache: Cache,
    directory: Path,
    dry_run: bool = False,
    *,
    drop: Collection[str] = (),
    progress: Progress = silent,
) -> list[StaleFile]:
    """Write a release's series back from the commits in `directory`.

    After `apply --upto`, the later steps of the project are re-derived on top.

    Args:
        drop: the slugs of the steps to remove from the series.

    Returns:
        The files that were stale, sorted; `dry_run` writes none of them.

    Raises:
        UsageError: `directory` was not made by `apply_to`, has uncommitted changes,
            or is not at the end of its series; or a step has no commit although
            `drop` does not name it, or has one although `drop` names it.
        SeriesError: a commit cannot be a step.
        ApplyError: a step after the last commit no longer fits.
    """
    work = open_work(directory)
    pinned = releases.load(project)
    if work.state.release not in pinned:
        raise UsageError(
            "the directory was made for a release that is not pinned any more",
            release=work.state.release,
            path=directory,
            detail=[f"pinned: {', '.join(pinned.names)}"],
            hint="git log -p releases.toml, then put the pin back",
        )
    release = pinned[work.state.release]
    if changes := pending(work):
        raise UsageError(
            "the directory has changes that are not committed",
            release=release.name,
            path=directory,
            detail=changes[:10],
            hint=f"git -C {quoted(work)} status",
        )
    require_end(work)
    store = Store(cache)
    base = store.base(release, offline=False, progress=progress)
    if base.id != work.state.base:
        raise UsageError(
            "the directory was made from another base of this release",
            release=release.name,
            path=directory,
            hint=start_over(release.name, directory),
        )
    commits = commits_since(work, project, base.id)
    with cache.scratch() as scratch:
        staged = _stage(project, scratch)
        steps = [commit.step for commit in commits]
        later = _later(project, work, steps)
        _require_dropped(project, work, [*steps, *later], drop)
        with relocated(staged.root, project.root):
            _put_steps(staged, release.name, steps)
            for commit in commits:
                _put_added(project, staged, commit)
            series = trees(store, staged, release, progress=progress)
            _require_same(store, work, commits, series)
            steps += rederive(store, staged, series.tip, steps, later)
            _put_steps(staged, release.name, steps)
        _drop_unused(project, staged, release.name, steps)
        stale = _compare(project, staged)
        if not dry_run:
            _write(project, staged, stale)
    return stale


def _later(project: Project, work: Work, committed: list[Step]) -> list[Step]:
    """After `apply --upto`, the project's steps that are not in the directory. The
    patch of a step that has a commit there is not read: it may be malformed.

    Raises:
        UsageError: the series lost the step up to which the directory was made.
        SeriesError: a later step is malformed.
    """
    release, upto = work.state.release, work.state.upto
    if upto is None:
        return []
    order = read_order(project, release)
    try:
        begin = position(order, upto, release)
    except UsageError:
        raise UsageError(
            f"the series lost the step {upto} since the directory was made",
            release=release,
            path=project.series_dir(release) / ORDER,
            hint=start_over(release, work.git.work_tree),
        ) from None
    present = {step.slug for step in committed}
    return [
        load_step(project, release, slug)
        for slug in order[begin:]
        if slug not in present
    ]


def _require_dropped(
    project: Project, work: Work, steps: Iterable[Step], drop: Collection[str]
) -> None:
    """Require that exactly the steps in `drop` disappear from the series.

    Raises:
        UsageError: another step disappears, or a step in `drop` does not.
    """
    release, place = work.state.release, quoted(work)
    before, after = read_order(project, release), {step.slug for step in steps}
    for slug in drop:
        if slug in after:
            raise UsageError(
                f"the step {slug} is to be dropped, and its commit is still there",
                release=release,
                step=slug,
                path=work.git.work_tree,
                hint=f"git -C {place} rebase -i base, and delete the step's line",
            )
        require_step(before, slug, release)
    if missing := [slug for slug in before if slug not in after and slug not in drop]:
        options = " ".join(f"--drop {slug}" for slug in (*drop, *missing))
        raise UsageError(
            "steps of the series have no commit in the directory and would be lost:"
            f" {', '.join(missing)}",
            release=release,
            step=missing[0],
            path=work.git.work_tree,
            hint=f"xpustack save {place} {options} if they are to go;"
            f" git -C {place} reflog shows the commits that were there",
        )


def _stage(project: Project, scratch: Path) -> Project:
    """A copy of the folders that `save` may change; it changes the copy first.

    Raises:
        SeriesError: there is a link in them.
    """
    for folder in (project.patches, project.overlay, project.kernels):
        for link in links_below(folder):
            raise SeriesError(
                "this is a symbolic link, and links are not followed",
                path=link,
                hint=without_link(link),
            )
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


def _put_steps(staged: Project, release: str, steps: Iterable[Step]) -> None:
    """Write the patches and the order file of a series; other files stay."""
    directory = staged.series_dir(release)
    for slug in read_order(staged, release):
        (directory / (slug + SUFFIX)).unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    order = directory / ORDER
    slugs = []
    for step in steps:
        (directory / (step.slug + SUFFIX)).write_bytes(format_patch(step))
        slugs.append(step.slug)
    before = order.read_bytes() if order.exists() else b""
    order.write_bytes(format_order(slugs, before))


def _put_added(project: Project, staged: Project, commit: StepCommit) -> None:
    """Write a commit's new files to the staged overlay and kernels."""
    for path, content in commit.added.items():
        if not path.startswith(KERNEL_HOME + "/"):
            target = _overlay_target(staged, commit.step.release, path, content)
        else:
            name = path.removeprefix(KERNEL_HOME + "/")
            target = kernel_package(staged) / name
            if name == f"{TRITON}.py" and content == TRITON_IN_VLLM:
                continue
            if name == f"{TRITON}.py" or not _KERNEL_FILE.fullmatch(name):
                raise SeriesError(
                    "this kernel file is generated, or is neither a module nor what was"
                    " tuned for a device",
                    release=commit.step.release,
                    step=commit.step.slug,
                    path=path,
                    hint="git rebase -i base in the directory, and take the file out"
                    " of the commit",
                )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _overlay_target(staged: Project, release: str, path: str, content: bytes) -> Path:
    """The place for an overlay file: the release's folder if it has the file, or if
    another release relies on a different common one; else `common`."""
    own, common = staged.overlay / release / path, staged.overlay / COMMON / path
    if own.is_file():
        return own
    if common.is_file() and common.read_bytes() != content:
        for other in staged.patches.iterdir():
            relies = not (staged.overlay / other.name / path).is_file()
            if other.name != release and relies and path in _overlaid(other):
                return own
    return common


def _drop_unused(
    project: Project, staged: Project, release: str, steps: Iterable[Step]
) -> None:
    """Remove staged overlay files that the release added before and that no series
    adds now."""
    before = _overlaid(project.series_dir(release))
    after = {path for step in steps for path in step.trailers.overlay}
    for path in before - after:
        (staged.overlay / release / path).unlink(missing_ok=True)
        if not any(path in _overlaid(other) for other in staged.patches.iterdir()):
            (staged.overlay / COMMON / path).unlink(missing_ok=True)


def _overlaid(series: Path) -> set[str]:
    """The overlay paths in the patches of a folder, which may be malformed."""
    paths: set[str] = set()
    for patch in series.glob("*" + SUFFIX):
        head = patch.read_bytes().partition(b"\n---\n")[0].decode("utf-8", "replace")
        paths.update(re.findall(r"^Overlay: (.+)$", head, re.MULTILINE))
    return paths


def _require_same(
    store: Store, work: Work, commits: list[StepCommit], series: Series
) -> None:
    """Require that the staged series gives the trees of the commits."""
    for commit, tree in zip(commits, series.steps, strict=True):
        if commit.tree == tree.tree_id:
            continue
        link_objects(store, work.git)
        changes = work.git.changes(commit.commit, tree.tree_id)
        raise SeriesError(
            "applying the saved step would not give the commit's tree",
            release=commit.step.release,
            step=commit.step.slug,
            path=work.git.work_tree,
            detail=[_LEGEND]
            + [f"{change.status}\t{change.path}" for change in changes[:10]],
            hint=f"git -C {quoted(work)} show --stat {commit.commit[:12]}",
        )


def _compare(project: Project, staged: Project) -> list[StaleFile]:
    stale = []
    for folder in (project.patches, project.overlay, project.kernels):
        relative = folder.relative_to(project.root)
        before, after = _files(project.root, relative), _files(staged.root, relative)
        for path in sorted(before.keys() | after.keys()):
            if path not in after:
                stale.append(StaleFile(path, "removed"))
            elif path not in before:
                stale.append(StaleFile(path, "new"))
            elif before[path] != after[path]:
                stale.append(StaleFile(path, "changed"))
    return stale


def _files(root: Path, relative: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(root): path.read_bytes()
        for path in (root / relative).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _write(project: Project, staged: Project, stale: list[StaleFile]) -> None:
    """Change the project to the staged state. New content is written first, then the
    order file; files are removed last, so that a kill in between loses nothing."""
    for file in sorted(stale, key=lambda file: (file.path.name == ORDER, file.path)):
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
