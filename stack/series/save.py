# SPDX-License-Identifier: Apache-2.0
"""From the commits of a work repository back to patches, overlay and kernels.

Before anything is written, the result is applied again and must give the same trees
as the commits.
"""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from stack.base import releases
from stack.base.download import base_of
from stack.base.releases import Release
from stack.base.store import Store
from stack.core.cache import Cache
from stack.core.errors import (
    ApplyError,
    SeriesError,
    UsageError,
    command,
    relocated,
)
from stack.core.project import Project
from stack.series.apply import trees, trees_before_failure
from stack.series.order import (
    ORDER,
    position,
    read_order,
    require_step,
)
from stack.series.overlay import COMMON, TRITON, kernel_package
from stack.series.patch import load_series
from stack.series.recorded import format_trees, trees_file
from stack.series.revision import step_digests
from stack.series.sharing import chosen_texts, read_texts, share, write_texts
from stack.series.staging import (
    StaleFile,
    compare,
    require_writable,
    stage,
    write,
)
from stack.series.tree import KERNEL_HOME, Series
from stack.series.worktree import StepCommit, Work, link_objects, start_over

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
    check: Callable[[list[StaleFile]], None] = lambda stale: None,
) -> list[StaleFile]:
    """Write a release's series back from the commits in `directory`.

    A changed step changes for all releases that share its patch; one that cannot take
    the change keeps the old patch as a variant of its own. After `apply --upto`, the
    later steps stay as they are.

    Args:
        drop: the slugs of the steps to remove from the series.
        alone: change no other release's steps.
        check: raises an error if what would be written must not be.

    Returns:
        The files that were stale, sorted; `dry_run` writes none of them.

    Raises:
        UsageError: `directory` was not made by `apply_to`, has uncommitted changes,
            or is not at the end of its series; or a step has no commit although
            `drop` does not name it, or has one although `drop` names it.
        SeriesError: a commit cannot be a step.
        ApplyError: a step after the last commit no longer fits.
        SourceError: the base of a release that shares a changed step is unavailable.
        EnvironmentProblem: the project cannot be written.
    """
    if not dry_run:
        require_writable(project)
    work = Work.at(directory)
    pinned = releases.load(project)
    if work.state.release not in pinned:
        raise work.refusal(
            "the directory was made for a release that is not pinned any more",
            f"pinned: {', '.join(pinned.names)}",
            hint="git log -p releases.toml, then put the pin back",
        )
    release = pinned[work.state.release]
    work.require_end()
    store = Store(cache)
    if base_of(store, release).id != work.state.base:
        raise work.refusal(
            "the directory was made from another base of this release",
            hint=start_over(release.name, directory),
        )
    commits = work.steps(project)
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
            steps = {commit.commit: commit.step for commit in commits}
            own = chosen_texts(work.git, scratch, steps, texts, release.name)
            own |= {slug: before[slug] for slug in later}
            after = {**texts, release.name: own}
            write_texts(staged, after)
            series = _applied(store, work, staged, release, commits)
            trees_of = {release.name: series}
            if not alone:
                trees_of |= share(store, project, staged, pinned, series, texts, after)
            _drop_unused(project, staged, pinned.names, release.name)
            changes = compare(project, staged)
            for other in pinned:
                if other.name not in trees_of and _brings_others(
                    project, staged, changes, other.name
                ):
                    trees_of[other.name] = trees(store, staged, other, recorded=False)
            for name, series in trees_of.items():
                place = trees_file(staged, name)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(format_trees(series.steps))
        stale = compare(project, staged)
        check(stale)
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
        raise work.refusal(
            f"the series lost the step {upto} since the directory was made",
            f"see {project.series_dir(release) / ORDER}",
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
    series = trees_before_failure(store, staged, release, recorded=False)
    _require_same(store, work, commits, series)
    problem = series.problem
    if isinstance(problem, ApplyError) and len(series.steps) >= len(commits):
        problem.message = "the step does not fit the changed steps before it: " + (
            problem.message
        )
        problem.hint = (
            f"xpustack apply {release.name} --to NEW (without --upto), change the early"
            " step there with git rebase -i base, xpustack save NEW"
        )
    if problem is not None:
        raise problem
    return series


def _require_dropped(
    project: Project, work: Work, after: Collection[str], drop: Collection[str]
) -> None:
    """Require that exactly the steps in `drop` disappear from the series, which is to
    have those in `after`.

    Raises:
        UsageError: another step disappears, or a step in `drop` does not.
    """
    before = read_order(project, work.state.release)
    for slug in drop:
        if slug in after:
            raise work.refusal(
                f"the step {slug} is to be dropped, and its commit is still there",
                hint=f"{work.command('rebase', '-i', 'base')}, and delete the step's"
                " line",
                step=slug,
            )
        require_step(before, slug, work.state.release)
    if missing := [slug for slug in before if slug not in after and slug not in drop]:
        options = [word for slug in (*drop, *missing) for word in ("--drop", slug)]
        save_so = command("xpustack", "save", work.git.work_tree, *options)
        raise work.refusal(
            "steps of the series have no commit in the directory and would be lost:"
            f" {', '.join(missing)}",
            hint=f"{save_so} if they are to go; {work.command('reflog')} shows the"
            " commits that were there",
            step=missing[0],
        )


def _put_added(staged: Project, names: Iterable[str], commit: StepCommit) -> None:
    """Write a commit's new files to the staged overlay and kernels."""
    for path, content in commit.added.items():
        kernel = path.removeprefix(KERNEL_HOME + "/")
        if kernel == path:
            target = _overlay_target(staged, names, commit.step.release, path, content)
        elif kernel == f"{TRITON}.py":
            continue
        else:
            target = kernel_package(staged) / kernel
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
    return {
        line.removeprefix("Overlay: ")
        for text in read_texts(project, [release])[release].values()
        for line in text.partition(b"\n---\n")[0].decode("utf-8", "replace").split("\n")
        if line.startswith("Overlay: ")
    }


def _brings_others(
    project: Project, staged: Project, changes: list[StaleFile], release: str
) -> bool:
    """Whether changed kernels or overlay files change what a release brings."""
    places = (staged.kernels, staged.overlay / COMMON, staged.overlay / release)
    changed = [staged.root / file.path for file in changes]
    if not any(path.is_relative_to(place) for path in changed for place in places):
        return False
    old, new = (
        step_digests(each, load_series(each, release)) for each in (project, staged)
    )
    return old != new


def _require_same(
    store: Store, work: Work, commits: list[StepCommit], series: Series
) -> None:
    """Require that the staged series gives the trees of the commits."""
    for commit, tree in zip(commits, series.steps, strict=False):
        if commit.tree == tree.tree_id:
            continue
        link_objects(store, work.git)
        changes = work.git.changes(commit.commit, tree.tree_id)
        raise work.refusal(
            "applying the saved step would not give the commit's tree",
            _LEGEND,
            *(f"{change.status}\t{change.path}" for change in changes[:10]),
            hint=work.command("show", "--stat", commit.commit[:12]),
            step=commit.step.slug,
            kind=SeriesError,
        )
