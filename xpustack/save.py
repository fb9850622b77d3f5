# SPDX-License-Identifier: Apache-2.0
"""From the commits of a work repository back to patches, overlay and kernels.

A file that a commit adds is overlay or kernel; one that it changes or deletes is
patch. Nothing is written before the result was applied again and gave the very
trees that the commits have.
"""

import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from xpustack import releases
from xpustack.bring import COMMON, KERNEL_HOME, TRITON, TRITON_IN_VLLM, kernel_source
from xpustack.cache import Cache, atomic_file
from xpustack.checkout import BASE, Work, link_objects, open_work, pending
from xpustack.diff import DiffError, parse_diff
from xpustack.errors import SeriesError, UsageError
from xpustack.git import DIFF_OPTIONS
from xpustack.progress import Progress, silent
from xpustack.project import RELEASES_FILE, Project
from xpustack.rederive import rederive
from xpustack.series import (
    ORDER,
    SLUG,
    SUFFIX,
    Step,
    format_order,
    format_patch,
    load_series,
    read_order,
    split_text,
    trailer_problems,
)
from xpustack.store import Store
from xpustack.tree import Tree, forbidden, trees

STEP_LINE = re.compile(r"^Step: *(\S+) *\n?", re.MULTILINE)
"""How a commit names its step; a patch is named by its file."""


@dataclass(frozen=True)
class Stale:
    """A file of the project that differs from what the commits say.

    `path` is relative to the project's root.
    """

    path: Path
    kind: Literal["new", "changed", "removed"]


@dataclass(frozen=True)
class Saved:
    """One commit of a work repository, taken apart."""

    commit: str
    tree: str
    step: Step
    added: Mapping[str, bytes]


def save(
    project: Project,
    cache: Cache,
    directory: Path,
    dry_run: bool = False,
    *,
    progress: Progress = silent,
) -> list[Stale]:
    """Write a release's series back from the commits in `directory`.

    After `apply --upto`, the steps that are not in `directory` follow, re-derived.

    Returns:
        The files that were stale, sorted; `dry_run` writes none of them.

    Raises:
        UsageError: `directory` was not made by `apply_to`, or has changes that
            are not committed.
        SeriesError: a commit cannot be a step.
        ApplyError: a step after the last commit does not fit any more.
    """
    work = open_work(directory)
    release = releases.load(project)[work.state.release]
    if changes := pending(work):
        raise UsageError(
            "the directory has changes that are not committed",
            release=release.name,
            path=directory,
            detail=changes[:10],
            hint=f"git -C {directory} status",
        )
    store = Store(cache)
    base = store.base(release, offline=False, progress=progress)
    if base.id != work.state.base:
        raise UsageError(
            "the directory was made from another base of this release",
            release=release.name,
            path=directory,
            hint=f"xpustack apply {release.name} --to NEW",
        )
    saved = _commits(work, project, base.id)
    with tempfile.TemporaryDirectory(prefix="xpustack-") as scratch:
        staged = _stage(project, Path(scratch))
        steps = [one.step for one in saved]
        _put_steps(staged, release.name, steps)
        for one in saved:
            _put_added(project, staged, one)
        made = trees(store, staged, release, progress=progress)
        _require_same(store, work, saved, made)
        if work.state.upto is not None:
            steps += _tail(project, store, staged, made, work.state.upto)
            _put_steps(staged, release.name, steps)
        _drop_unused(project, staged, release.name, steps)
        stale = _compare(project, staged)
        if not dry_run:
            _write(project, staged, stale)
    return stale


def _commits(work: Work, project: Project, base: str) -> list[Saved]:
    """The commits since the base, oldest first, as steps."""
    git, release = work.git, work.state.release
    log = git.text(
        "log", "--reverse", "--topo-order", "--format=%H %T %P%n%B%x00", f"{BASE}..HEAD"
    )
    saved: list[Saved] = []
    parent = base
    for record in log.split("\0")[:-1]:
        identity, _, message = record.lstrip("\n").partition("\n")
        commit, tree, *parents = identity.split()
        subject = message.partition("\n")[0]

        def refuse(
            problem: str, commit: str = commit, subject: str = subject
        ) -> SeriesError:
            return SeriesError(
                problem,
                release=release,
                path=git.work_tree,
                detail=[f"commit {commit[:12]} {subject}"],
                hint=f"git -C {git.work_tree} rebase -i base",
            )

        if parents != [parent]:
            raise refuse("the commits since the tag base are not one straight line")
        slug = STEP_LINE.search(message)
        if slug is None or not SLUG.fullmatch(slug[1]):
            raise refuse("the message lacks a line such as `Step: swa-rope`")
        if any(one.step.slug == slug[1] for one in saved):
            raise refuse(f"two commits are the step {slug[1]}")
        try:
            subject, text, trailers = split_text(STEP_LINE.sub("", message))
        except ValueError as error:
            raise refuse(str(error)) from None
        patched, added = _changes(work, parent, commit)
        diff = b""
        if patched:
            diff = git.run(
                "--literal-pathspecs",
                *("diff-tree", "-r", "-p", *DIFF_OPTIONS, parent, commit),
                *("--", *patched),
            )
        overlay = [path for path in added if not path.startswith(KERNEL_HOME + "/")]
        known = [path for path in trailers.overlay if path in overlay]
        new = [path for path in overlay if path not in known]
        trailers = replace(trailers, overlay=(*known, *new))
        path = project.series_dir(release) / (slug[1] + SUFFIX)
        try:
            files = parse_diff(diff)
        except DiffError as error:
            raise refuse(f"{error.message} ({error.path})") from None
        step = Step(release, slug[1], path, subject, text, trailers, diff, files)
        problems = trailer_problems(step)
        problems += [f"{name}: {why}" for name in patched if (why := forbidden(name))]
        problems += [
            f"{name} is a kernel: change it in the commit that adds it"
            for name in patched
            if name.startswith(KERNEL_HOME + "/")
        ]
        if not patched and not added:
            problems.append("the commit changes nothing")
        if problems:
            raise refuse("; ".join(problems))
        blobs = git.blobs(added.values()) if added else {}
        contents = {name: blobs[blob] for name, blob in added.items()}
        saved.append(Saved(commit, tree, step, contents))
        parent = commit
    return saved


def _changes(work: Work, parent: str, commit: str) -> tuple[list[str], dict[str, str]]:
    """The files that a commit changes or deletes, and those that it adds with
    their blob ids."""
    fields = (
        work.git.run(
            *("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev"),
            *(parent, commit),
        )
        .decode("utf-8", "replace")
        .split("\0")[:-1]
    )
    patched, added = [], {}
    for properties, path in zip(fields[::2], fields[1::2], strict=True):
        _, mode, _, blob, status = properties.split(" ")
        if status != "A":
            patched.append(path)
        elif mode != "100644":
            raise SeriesError(
                "a step may add plain files only (mode 100644)",
                release=work.state.release,
                path=path,
                hint=f"git -C {work.git.work_tree} rebase -i base",
            )
        else:
            added[path] = blob
    return patched, added


def _stage(project: Project, scratch: Path) -> Project:
    """A copy of what `save` may write, to be changed first."""
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
    directory = staged.series_dir(release)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    slugs = []
    for step in steps:
        (directory / (step.slug + SUFFIX)).write_bytes(format_patch(step))
        slugs.append(step.slug)
    (directory / ORDER).write_bytes(format_order(slugs))


def _put_added(project: Project, staged: Project, one: Saved) -> None:
    """Write a commit's new files to the staged overlay and kernels."""
    for path, content in one.added.items():
        if not path.startswith(KERNEL_HOME + "/"):
            target = _overlay_target(staged, one.step.release, path, content)
        else:
            name = path.removeprefix(KERNEL_HOME + "/").removesuffix(".py")
            target = kernel_source(staged, name)
            if name == TRITON and content == TRITON_IN_VLLM:
                continue
            if name == TRITON or "/" in name or not path.endswith(".py"):
                raise SeriesError(
                    "this kernel file is generated or is no module",
                    release=one.step.release,
                    step=one.step.slug,
                    path=path,
                    hint="git rebase -i base, and take the file out of the commit",
                )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _overlay_target(staged: Project, release: str, path: str, content: bytes) -> Path:
    """Where an overlay file goes: to the release's folder if it has the file or
    if another release relies on a different common one, else to `common`."""
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
    """Remove staged overlay files that the release brought before and no series
    brings now."""
    before = _overlaid(project.series_dir(release))
    now = {path for step in steps for path in step.trailers.overlay}
    for path in before - now:
        (staged.overlay / release / path).unlink(missing_ok=True)
        if not any(path in _overlaid(other) for other in staged.patches.iterdir()):
            (staged.overlay / COMMON / path).unlink(missing_ok=True)


def _overlaid(series: Path) -> set[str]:
    """The overlay paths that the patches of a folder name, well-formed or not."""
    found: set[str] = set()
    for patch in series.glob("*" + SUFFIX):
        head = patch.read_bytes().partition(b"\n---\n")[0].decode("utf-8", "replace")
        found.update(re.findall(r"^Overlay: (.+)$", head, re.MULTILINE))
    return found


def _require_same(
    store: Store, work: Work, saved: list[Saved], made: list[Tree]
) -> None:
    for one, tree in zip(saved, made[1:], strict=True):
        if one.tree == tree.tree_id:
            continue
        link_objects(store, work.git)
        names = work.git.text(
            *("diff-tree", "-r", "--no-renames", "--name-status"),
            *(one.commit, tree.tree_id),
        )
        raise SeriesError(
            "applying the saved step would not give the commit's tree",
            release=one.step.release,
            step=one.step.slug,
            path=work.git.work_tree,
            detail=[
                "D: the commit has it, no Kernels: trailer reaches it;"
                " A: the trailers bring it, the commit lacks it; M: they differ",
                *names.splitlines()[:10],
            ],
            hint=f"git -C {work.git.work_tree} show --stat {one.commit[:12]}",
        )


def _tail(
    project: Project, store: Store, staged: Project, made: list[Tree], upto: str
) -> list[Step]:
    """The steps that followed `upto` in the project, on top of the saved ones."""
    release = made[0].release
    order = read_order(project, release.name)
    if upto not in order:
        raise UsageError(
            f"the series lost the step {upto} since the directory was made",
            release=release.name,
            path=project.series_dir(release.name) / ORDER,
            hint=f"xpustack apply {release.name} --to NEW",
        )
    before = [tree.step for tree in made if tree.step is not None]
    here = {step.slug for step in before}
    later = load_series(project, release.name)[order.index(upto) + 1 :]
    tail = [step for step in later if step.slug not in here]
    return rederive(store, staged, made[-1], before, tail)


def _compare(project: Project, staged: Project) -> list[Stale]:
    stale = []
    for folder in (project.patches, project.overlay, project.kernels):
        relative = folder.relative_to(project.root)
        before, after = _files(project.root, relative), _files(staged.root, relative)
        for path in sorted(before.keys() | after.keys()):
            if path not in after:
                stale.append(Stale(path, "removed"))
            elif path not in before:
                stale.append(Stale(path, "new"))
            elif before[path] != after[path]:
                stale.append(Stale(path, "changed"))
    return stale


def _files(root: Path, relative: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(root): path.read_bytes()
        for path in (root / relative).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _write(project: Project, staged: Project, stale: list[Stale]) -> None:
    """Bring the project to the staged state; a series' order file comes last."""
    for one in sorted(stale, key=lambda one: (one.path.name == ORDER, one.path)):
        target = project.root / one.path
        if one.kind == "removed":
            target.unlink()
            continue
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        with atomic_file(target) as file:
            file.write((staged.root / one.path).read_bytes())
        target.chmod(mode)
