# SPDX-License-Identifier: Apache-2.0
"""From a release and its series to trees: one deterministic commit per step.

The ref of a step's commit is a hash of everything that goes into it, so looking up a
series that is already in the store takes two git processes, however much else the store
holds. Nothing needs a work tree. A diff that does not fit is refused with its hunk and
both sides.
"""

import contextlib
import difflib
import hashlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from stack.base.download import base_of
from stack.base.releases import Release
from stack.base.store import Store, Writer
from stack.core.errors import ApplyError, SeriesError
from stack.core.git import GitFailed
from stack.core.project import Project
from stack.core.repository import Commit, Repository
from stack.series.diff import FileDiff, Hunk
from stack.series.order import blaming, position, read_patches
from stack.series.overlay import NewFile, NewFiles
from stack.series.patch import format_patch, load_step
from stack.series.recorded import read_trees, require_recorded_tree
from stack.series.tree import BaseTree, Series, Step, StepTree, Tree

Content = tuple[Step, dict[str, NewFile]]
"""A step, and its new files by path."""

_FORMAT = b"xpustack tree 2\n"
SHOWN = 16
"""How many lines of a mismatch an error shows at most."""


def trees(
    store: Store,
    project: Project,
    release: Release,
    *,
    upto: str | None = None,
    recorded: bool = True,
) -> Series:
    """The base and every tree of a release's series.

    Args:
        upto: the last step to apply, by its slug, or `base` for none; None for the
            whole series.
        recorded: insist on the recorded trees; what records them cannot.

    Raises:
        SourceError: the base is unavailable.
        SeriesError: a patch, a trailer, an overlay file or a kernel is malformed.
        ApplyError: a step does not fit the tree before it.
        UsageError: there is no step `upto`.
    """
    series = trees_before_failure(store, project, release, upto=upto, recorded=recorded)
    if series.problem is not None:
        raise series.problem
    return series


def trees_before_failure(
    store: Store,
    project: Project,
    release: Release,
    *,
    upto: str | None = None,
    recorded: bool = True,
) -> Series:
    """As `trees`, but a step that is malformed or does not fit is the `problem` of the
    series, which ends before it.

    Raises:
        SourceError: the base is unavailable.
        SeriesError: the order of the steps, or the record of their trees, is malformed.
        EnvironmentProblem: the machine, not a step, is the cause.
        UsageError: there is no step `upto`.
    """
    contents, problem = _well_formed(project, release.name, upto)
    ids = read_trees(project, release.name) if recorded else {}
    base = base_of(store, release)
    series = Series(BaseTree(release, base.id, base.tree), problem=problem)
    refs = list(_refs(series.base.commit, contents))
    commits = store.commits(refs)
    with contextlib.ExitStack() as stack:
        writer: Writer | None = None
        for (step, files), ref in zip(contents, refs, strict=True):
            try:
                with blaming(release.name, step.path):
                    commit = commits.get(ref)
                    if commit is None:
                        if writer is None:
                            said = f"applying {release.name} from {step.slug} on"
                            store.cache.progress(said)
                            writer = stack.enter_context(store.writing())
                            writer.read_tree(series.tip.tree_id)
                        with store.cache.scratch() as scratch:
                            commit = _apply(writer, series.tip, step, files, scratch)
                        writer.set_ref(ref, commit.id)
                    else:
                        store.count_as_used(ref)
                        if writer is not None:
                            writer.read_tree(commit.tree)
                    if recorded:
                        require_recorded_tree(project, step, commit.tree, ids)
            except SeriesError as error:
                return replace(series, problem=error)
            changed = tuple(sorted({*step.touched, *files}))
            added = tuple(sorted(files))
            tree = StepTree(step, *commit, series.tip, changed, added)
            series = series.followed_by(tree)
    return series


def _well_formed(
    project: Project, release: str, upto: str | None
) -> tuple[list[Content], SeriesError | None]:
    """The steps of a series before the first malformed one, and its error."""
    patches = read_patches(project, release)
    slugs = list(patches)
    if upto is not None:
        slugs = slugs[: position(slugs, upto, release)]
    new_files = NewFiles(project)
    contents: list[Content] = []
    for slug in slugs:
        try:
            step = load_step(release, patches[slug])
            contents.append((step, new_files.of(step)))
        except SeriesError as error:
            return contents, error
    return contents, None


def _refs(base: str, contents: Iterable[Content]) -> Iterator[str]:
    """The refs of a series' commits, each a hash of everything that goes into one."""
    before = base
    for step, files in contents:
        digest = hashlib.sha256(_FORMAT)
        parts = [before.encode(), step.slug.encode(), format_patch(step)]
        for path, file in sorted(files.items()):
            parts += [path.encode(), file.content]
        for part in parts:
            digest.update(b"%d\n" % len(part) + part)
        before = digest.hexdigest()
        yield f"refs/steps/{before}"


def _apply(
    writer: Writer,
    parent: Tree,
    step: Step,
    files: dict[str, NewFile],
    scratch: Path,
) -> Commit:
    """Apply a step to the index of `writer`, which holds the tree before."""
    present = writer.files(parent.tree_id).keys() if files else ()
    if step.diff:
        try:
            writer.apply(step.diff)
        except GitFailed as error:
            tree, said = parent.tree_id, error.stderr
            raise misfit(writer, tree, step.files, said) from None
    for path, new_file in files.items():
        parents = (str(parent) for parent in PurePosixPath(path).parents)
        if clash := next((name for name in (path, *parents) if name in present), None):
            raise ApplyError(
                f"the tree already has {clash}: there the change is a patch",
                path=new_file.source,
                hint=f"take {path} out of the trailers in {step.path},"
                f" rm {shlex.quote(str(new_file.source))}, and change the file in a"
                " commit: CONTRIBUTING.md, change a step",
            )
    if files:
        writer.add({path: file.content for path, file in files.items()}, scratch)
    return writer.commit(parent.commit, step.commit_message)


def misfit(
    git: Repository, tree: str, files: Iterable[FileDiff], refusal: str
) -> ApplyError:
    """The error for a diff of some files that git refuses on a tree.

    Args:
        refusal: what git says.
    """
    entries = git.files(tree, [file.path for file in files])
    contents = git.blobs(entry.blob for entry in entries.values())
    for file in files:
        entry = entries.get(file.path)
        if entry is None:
            return ApplyError("the tree has no such file to patch", path=file.path)
        content = contents[entry.blob]
        for number, hunk in enumerate(file.hunks, start=1):
            expected = b"\n" + b"".join(hunk.before)
            # Only the last line of a file can lack its line feed.
            expected += b"" if expected.endswith(b"\n") else b"\0"
            if expected not in b"\n" + content + b"\0":
                first = hunk.old_start - (hunk.old_count > 0)
                actual = content.split(b"\n")[first : first + hunk.old_count]
                return ApplyError(
                    f"hunk {number} of {len(file.hunks)} ({hunk.header}) does not fit",
                    path=file.path,
                    detail=_sides(hunk, actual),
                )
    return ApplyError("git refuses the patch", detail=refusal)


def _sides(hunk: Hunk, actual: Sequence[bytes]) -> list[str]:
    def text(lines: Sequence[bytes]) -> list[str]:
        return [line.decode("utf-8", "replace").rstrip("\n") for line in lines]

    diff = difflib.unified_diff(text(hunk.before), text(actual), lineterm="", n=3)
    lines = list(diff)[3:]
    surplus = len(lines) - SHOWN
    if surplus > 0:
        lines = [*lines[:SHOWN], f"... {surplus} more lines"]
    return [
        f"from line {hunk.old_start} on (- the patch expects, + the tree has):",
        *lines,
    ]
