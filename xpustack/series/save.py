# SPDX-License-Identifier: Apache-2.0
"""From the commits of a work repository back to patches, overlay and kernels.

Before anything is written, the result is applied again and must give the same trees
as the commits.
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from xpustack.base import releases
from xpustack.base.download import base_of
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.cache import Cache
from xpustack.core.errors import ApplyError, SeriesError, UsageError, relocated
from xpustack.core.project import Project
from xpustack.series.apply import trees, trees_before_failure
from xpustack.series.commits import StepCommit, commits_since, quoted, require_end
from xpustack.series.order import (
    ORDER,
    position,
    read_order,
    read_patches,
    require_step,
)
from xpustack.series.overlay import (
    COMMON,
    KERNEL_HOME,
    TRITON,
    TRITON_IN_VLLM,
    kernel_package,
)
from xpustack.series.patch import load_series
from xpustack.series.recorded import format_trees, trees_file
from xpustack.series.revision import step_digests
from xpustack.series.sharing import (
    Sharing,
    chosen_texts,
    head,
    read_texts,
    write_texts,
)
from xpustack.series.staging import StaleFile, compare, files_below, stage, write
from xpustack.series.tree import Series
from xpustack.series.worktree import (
    Work,
    link_objects,
    open_work,
    pending,
    start_over,
)

_KERNEL_FILE = re.compile(r"[^/]+\.py")
_LEGEND = (
    "D: the commit has it, no Kernels: trailer reaches it;"
    " A: the trailers bring it, the commit lacks it; M: they differ"
)


def save(
    project: Project,
    cache: Cache,
    directory: Path,
    dry_run: bool = False,
    *,
    drop: Collection[str] = (),
    alone: bool = False,
) -> list[StaleFile]:
    """Write a release's series back from the commits in `directory`.

    A changed step changes for all releases that share its patch; one that cannot take
    the change keeps the old patch as a variant of its own. After `apply --upto`, the
    later steps stay as they are.

    Args:
        drop: the slugs of the steps to remove from the series.
        alone: change no other release's steps.

    Returns:
        The files that were stale, sorted; `dry_run` writes none of them.

    Raises:
        UsageError: `directory` was not made by `apply_to`, has uncommitted changes,
            or is not at the end of its series; or a step has no commit although
            `drop` does not name it, or has one although `drop` names it.
        SeriesError: a commit cannot be a step.
        ApplyError: a step after the last commit no longer fits.
        SourceError: the base of a release that shares a changed step is unavailable.
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
    base = base_of(store, release)
    if base.id != work.state.base:
        raise UsageError(
            "the directory was made from another base of this release",
            release=release.name,
            path=directory,
            hint=start_over(release.name, directory),
        )
    commits = commits_since(work, project, base.id)
    texts = read_texts(project, pinned.names)
    with cache.scratch() as scratch:
        staged = stage(project, scratch)
        later = _later(project, work, commits)
        slugs = [*(commit.step.slug for commit in commits), *later]
        _require_dropped(project, work, slugs, drop)
        with relocated(staged.root, project.root):
            for commit in commits:
                _put_added(staged, pinned.names, commit)
            before = texts.get(release.name, {})
            own = chosen_texts(work.git, scratch, commits, texts, release.name)
            own |= {slug: before[slug] for slug in later}
            changed = {slug: own[slug] for slug in own if own[slug] != before.get(slug)}
            after = {**texts, release.name: own}
            write_texts(staged, after)
            trees_of = {release.name: _applied(store, work, staged, release, commits)}
            if not alone:
                sharing = Sharing(store, staged, pinned, release.name, texts)
                trees_of |= sharing.give(changed, after)
            _drop_unused(project, staged, pinned.names, release.name)
            for other in pinned:
                if other.name not in trees_of and _brings_changed(
                    project, staged, other.name
                ):
                    trees_of[other.name] = trees(store, staged, other, recorded=False)
            for name, series in trees_of.items():
                place = trees_file(staged, name)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(format_trees(series.steps))
        stale = compare(project, staged)
        if not dry_run:
            write(project, staged, stale)
    return stale


def _later(project: Project, work: Work, commits: list[StepCommit]) -> list[str]:
    """After `apply --upto`, the project's steps that are not in the directory.

    Raises:
        UsageError: the series lost the step up to which the directory was made.
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
    present = {commit.step.slug for commit in commits}
    return [slug for slug in order[begin:] if slug not in present]


def _applied(
    store: Store,
    work: Work,
    staged: Project,
    release: Release,
    commits: list[StepCommit],
) -> Series:
    """The trees of the staged series; the first ones are those of the commits.

    Raises:
        ApplyError: a later step does not fit.
        SeriesError: a tree is not that of its commit.
    """
    series, problem = trees_before_failure(store, staged, release, recorded=False)
    if series is not None:
        _require_same(store, work, commits, series)
    later = series is not None and len(series.steps) >= len(commits)
    if later and isinstance(problem, ApplyError):
        problem.message = "the step does not fit the changed steps before it: " + (
            problem.message
        )
        problem.hint = (
            f"xpustack apply {release.name} --to NEW (without --upto), change the early"
            " step there with git rebase -i base, xpustack save NEW"
        )
    if problem is not None:
        raise problem
    assert series is not None, "without a base there is a problem"
    return series


def _require_dropped(
    project: Project, work: Work, after: Collection[str], drop: Collection[str]
) -> None:
    """Require that exactly the steps in `drop` disappear from the series, which is to
    have those in `after`.

    Raises:
        UsageError: another step disappears, or a step in `drop` does not.
    """
    release, place = work.state.release, quoted(work)
    before = read_order(project, release)
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


def _put_added(staged: Project, names: Iterable[str], commit: StepCommit) -> None:
    """Write a commit's new files to the staged overlay and kernels."""
    for path, content in commit.added.items():
        if not path.startswith(KERNEL_HOME + "/"):
            target = _overlay_target(staged, names, commit.step.release, path, content)
        else:
            name = path.removeprefix(KERNEL_HOME + "/")
            target = kernel_package(staged) / name
            if name == f"{TRITON}.py" and content == TRITON_IN_VLLM:
                continue
            if name == f"{TRITON}.py" or not _KERNEL_FILE.fullmatch(name):
                raise SeriesError(
                    "this kernel file is generated, or is no module",
                    release=commit.step.release,
                    step=commit.step.slug,
                    path=path,
                    hint="git rebase -i base in the directory, and take the file out"
                    " of the commit",
                )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _overlay_target(
    staged: Project, others: Iterable[str], release: str, path: str, content: bytes
) -> Path:
    """The place for an overlay file: the release's folder if it has the file, or if
    one of `others` relies on a different common one; else `common`."""
    own, common = staged.overlay / release / path, staged.overlay / COMMON / path
    if own.is_file():
        return own
    if common.is_file() and common.read_bytes() != content:
        for other in others:
            relies = not (staged.overlay / other / path).is_file()
            if other != release and relies and path in _overlaid(staged, other):
                return own
    return common


def _drop_unused(
    project: Project, staged: Project, names: Iterable[str], release: str
) -> None:
    """Remove staged overlay files that the release added before and that no series
    adds now."""
    for path in _overlaid(project, release) - _overlaid(staged, release):
        (staged.overlay / release / path).unlink(missing_ok=True)
        if not any(path in _overlaid(staged, other) for other in names):
            (staged.overlay / COMMON / path).unlink(missing_ok=True)


def _overlaid(project: Project, release: str) -> set[str]:
    """The overlay paths in the patches of a release, which may be malformed."""
    paths: set[str] = set()
    for patch in read_patches(project, release).values():
        text = head(patch.read_bytes() if patch.is_file() else b"")
        lines = text.decode("utf-8", "replace")
        paths.update(re.findall(r"^Overlay: (.+)$", lines, re.MULTILINE))
    return paths


def _brings_changed(project: Project, staged: Project, release: str) -> bool:
    """Whether the staged kernels or overlay files change what a release brings."""
    folders = [Path(project.kernels.name)]
    folders += [Path(project.overlay.name) / name for name in (COMMON, release)]
    if all(
        files_below(project.root, folder) == files_below(staged.root, folder)
        for folder in folders
    ):
        return False
    brought = [
        step_digests(place, load_series(place, release)) for place in (project, staged)
    ]
    return brought[0] != brought[1]


def _require_same(
    store: Store, work: Work, commits: list[StepCommit], series: Series
) -> None:
    """Require that the staged series gives the trees of the commits."""
    for commit, tree in zip(commits, series.steps, strict=False):
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
