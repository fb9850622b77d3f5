# SPDX-License-Identifier: Apache-2.0
"""Carry one step to another release's tree by a 3-way merge, and judge the result.

The merge's common ancestor is the tree on which the step was made. One side is that
tree with the step, the other side is the target tree. Only `refresh` merges;
everywhere else a patch fits exactly or is refused. Where both collide, the form that
the step has on another release is tried: a conflict that is solved already, reviewed
and tested.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec
from packaging.version import Version

from stack.core.project import Project
from stack.core.repository import Conflict, Repository
from stack.series.diff import FileDiff, Hunk, parse_diff
from stack.series.order import SUFFIX, users
from stack.series.overlay import needed_kernels, overlay_files
from stack.series.patch import load_step
from stack.series.tree import Step, StepTree

CarryVerdict = Literal["clean", "merged", "variant", "conflict", "upstream"]
History = Callable[[str, tuple[int, int] | None], tuple[str, ...]]
"""The commits of upstream that changed a file, or lines of it given by the first and
their number."""
SHOWN = 12
"""The most lines that a report shows of one side of a conflict."""


class Clash(msgspec.Struct, frozen=True):
    """One place where the step and upstream conflict.

    `kind` is git's word, such as `content` or `modify/delete`. `hunk` and `ours`
    are the step's change, `upstream_hunk` and `theirs` the upstream change that
    it collides with; both as lines of a diff without context. All are empty if the
    conflict is not about lines. `commits` made the upstream change, where a clone knows
    them.
    """

    path: str
    kind: str
    hunk: str = ""
    ours: tuple[str, ...] = ()
    upstream_hunk: str = ""
    theirs: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()


class TouchedFile(msgspec.Struct, frozen=True):
    """A file of upstream that a step changes, how many lines upstream changed in it
    between the two releases, None where only the old one has the file, and the commits
    that did it, where a clone knows them."""

    path: str
    upstream_lines: int | None
    commits: tuple[str, ...] = ()


@dataclass(frozen=True)
class CarriedStep:
    """The result of carrying a step. `tree` is the tree with it, None after a conflict;
    `form` is the step as it was carried, `evidence` says why it counts as upstream, or
    why it had to be merged."""

    verdict: CarryVerdict
    tree: str | None
    form: Step
    evidence: str = ""
    clashes: tuple[Clash, ...] = ()
    files: tuple[TouchedFile, ...] = ()


@dataclass(frozen=True)
class Carrier:
    """Carries steps in a repository that holds both releases.

    Args:
        directory: the repository's git directory.
        scratch: a folder to write in.
        old_base, new_base: the two releases' bases, as commits.
        history: what a clone knows of the way from one to the other.
    """

    project: Project
    directory: Path
    scratch: Path
    old_base: str
    new_base: str
    history: History = field(default=lambda path, lines: ())

    @property
    def git(self) -> Repository:
        """The repository, with a private index."""
        return Repository(self.directory, index=self.scratch / "carry-index")

    def carry(
        self, source: StepTree, onto: str, *, variants: bool = True
    ) -> CarriedStep:
        """Carry a step, with the kernels that it needs, onto the commit `onto`; no
        branch moves.

        Args:
            variants: where it conflicts, try its other forms, the newest first.
        """
        carried = self.merge(source, onto)
        if carried.verdict == "upstream":
            return carried
        if carried.tree is not None:
            kernels = needed_kernels(self.project, source.step)
            return replace(carried, tree=self._with_files(carried.tree, kernels))
        for step in _variants(self.project, source.step) if variants else ():
            if (fitting := self._fitting(step, onto)) is not None:
                text = f"the patch of {step.path.stem} fits as it is"
                return CarriedStep("variant", fitting, step, text, files=carried.files)
        return carried

    def merge(self, source: StepTree, onto: str) -> CarriedStep:
        """Merge the step of `source` onto the commit `onto`."""
        step, before = source.step, source.parent
        files = self._upstream_changes(step.touched)
        here = self.git.tree_of(onto)
        ours = self.git.commit_tree(here, before.commit, "upstream\n")
        merged, conflicts = self.git.merge(ours, source.commit)
        if merged == here and source.changed:
            text = "nothing is left of it after the merge"
            return CarriedStep("upstream", here, step, text, (), files)
        if merged is None:
            if evidence := self._upstream_evidence(source, here):
                return CarriedStep("upstream", here, step, evidence, (), files)
            clashes = tuple(self._clashes(source, here, conflicts))
            return CarriedStep("conflict", None, step, "", clashes, files)
        if self._applies(step.diff, here):
            return CarriedStep("clean", merged, step, "", (), files)
        text = "its context changed: merged with the upstream changes around it"
        return CarriedStep("merged", merged, step, text, (), files)

    def _fitting(self, step: Step, onto: str) -> str | None:
        """The tree with another form of a step on the commit `onto`, where its diff
        applies with its full context; None where it does not."""
        here = self.git.tree_of(onto)
        if not self._applies(step.diff, here) or self.git.files(
            here, step.trailers.overlay
        ):
            return None
        if step.diff:
            self.git.apply(step.diff)
            here = self.git.write_tree()
        files = {
            path: file.content
            for path, file in overlay_files(self.project, step).items()
        }
        return self._with_files(here, files | needed_kernels(self.project, step))

    def commit(self, step: Step, tree: str, parent: str) -> str:
        """The carried step as a commit, with the step's own message."""
        return self.git.commit_tree(tree, parent, step.commit_message)

    def _with_files(self, tree: str, files: Mapping[str, bytes]) -> str:
        """`tree` with those of `files` that it lacks."""
        lacking = files.keys() - self.git.files(tree, files).keys()
        if not lacking:
            return tree
        self.git.read_tree(tree)
        self.git.add({path: files[path] for path in lacking}, self.scratch)
        return self.git.write_tree()

    def _applies(self, diff: bytes, tree: str, *, reverse: bool = False) -> bool:
        """Whether a diff applies with its full context, moved lines allowed."""
        if not diff:
            return True
        self.git.read_tree(tree)
        return self.git.applies(diff, reverse=reverse)

    def _upstream_evidence(self, source: StepTree, here: str) -> str:
        """Why the step's diff counts as upstream's own; empty if it does not."""
        if self.git.files(here, source.added).keys() != set(source.added):
            return ""
        if self._applies(source.step.diff, here, reverse=True):
            return "its diff applies in reverse"
        own = self._plain(source.parent.commit, source.commit, source.step.touched)
        theirs = self._plain(self.old_base, self.new_base, source.step.touched)
        upstream_hunks = {file.path: file.hunks for file in theirs}
        own_hunks = [(file.path, hunk) for file in own for hunk in file.hunks]
        if own_hunks and all(
            any(_contains(other, hunk) for other in upstream_hunks.get(path, ()))
            for path, hunk in own_hunks
        ):
            return "upstream's own diff has each of its changes (by patch id)"
        return ""

    def _clashes(
        self, source: StepTree, here: str, conflicts: Iterable[Conflict]
    ) -> Iterator[Clash]:
        """Each conflict with both sides and the upstream change behind it."""
        before = source.parent
        for conflict in conflicts:
            own = self._plain(before.commit, source.commit, [conflict.path])
            theirs = self._plain(before.commit, here, [conflict.path])
            pairs = [
                (hunk, upstream_hunk)
                for file in own
                for hunk in file.hunks
                for upstream_file in theirs
                for upstream_hunk in upstream_file.hunks
                if _collide(hunk, upstream_hunk)
            ]
            if not pairs:
                yield Clash(conflict.path, conflict.kind)
            for hunk, upstream_hunk in pairs:
                yield Clash(
                    conflict.path,
                    conflict.kind,
                    hunk.header,
                    _shown(hunk),
                    upstream_hunk.header,
                    _shown(upstream_hunk),
                    self.history(
                        conflict.path,
                        (upstream_hunk.new_start, upstream_hunk.new_count),
                    ),
                )

    def _plain(self, old: str, new: str, paths: Iterable[str]) -> tuple[FileDiff, ...]:
        """The difference of two trees in some files, without context."""
        return parse_diff(self.git.diff(old, new, paths, context=0))

    def _upstream_changes(self, paths: Iterable[str]) -> tuple[TouchedFile, ...]:
        paths = tuple(paths)
        before = self.git.files(self.old_base, paths)
        present = self.git.files(self.new_base, paths)
        changed = {
            file.path: file.changed
            for file in self._plain(self.old_base, self.new_base, paths)
        }
        return tuple(
            TouchedFile(
                path,
                changed.get(path, 0) if path in present else None,
                self.history(path, None) if path in changed else (),
            )
            for path in paths
            # The others are files of earlier steps.
            if path in before or path in present
        )


def _variants(project: Project, step: Step) -> Iterator[Step]:
    """The other forms of a step, the newest first."""
    paths = (project.patches / step.slug).glob("*" + SUFFIX)
    named = {path: names for path in paths if (names := users(path))}
    for path in sorted(named, key=lambda path: Version(path.stem), reverse=True):
        if path != step.path:
            yield load_step(named[path][-1], path)


def _contains(other: Hunk, hunk: Hunk) -> bool:
    """Whether a change contains another one: all its lines in a row, on both sides.
    Like a patch id, this ignores white space."""
    return all(_side(hunk, mark) in _side(other, mark) for mark in (b"-", b"+"))


def _side(hunk: Hunk, mark: bytes) -> bytes:
    """The lines with a mark, without white space, between line feeds."""
    lines = (line[1:].split() for line in hunk.lines if line.startswith(mark))
    return b"\n" + b"".join(b"".join(words) + b"\n" for words in lines)


def _collide(hunk: Hunk, other: Hunk) -> bool:
    """Whether two changes of one text overlap, or have no line between them."""
    first = hunk.old_start + (hunk.old_count == 0)
    second = other.old_start + (other.old_count == 0)
    return first <= second + other.old_count and second <= first + hunk.old_count


def _shown(hunk: Hunk) -> tuple[str, ...]:
    lines = [line.decode("utf-8", "replace").rstrip("\n") for line in hunk.lines]
    if len(lines) > SHOWN:
        return (*lines[:SHOWN], f"... {len(lines) - SHOWN} more lines")
    return tuple(lines)
