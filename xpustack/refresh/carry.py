# SPDX-License-Identifier: Apache-2.0
"""Carrying one step to another release's tree by a 3-way merge, and judging it.

The merge's common ancestor is the tree on which the step was made, one side is
that tree with the step, the other the tree it is to land on. `refresh` alone may
merge; everywhere else a patch fits exactly or not at all.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from xpustack.core.repository import Conflict, Repository
from xpustack.series.apply import commit_message
from xpustack.series.diff import FileDiff, Hunk, parse_diff
from xpustack.series.tree import StepTree

Verdict = Literal["clean", "merged", "conflict", "upstream"]
SHOWN = 12
"""Lines of one side of a conflict that a report shows at most."""


class Clash(msgspec.Struct, frozen=True):
    """One place where step and upstream want different things.

    `kind` is git's word, such as `content` or `modify/delete`. `hunk` and `ours`
    are the step's change, `upstream_hunk` and `theirs` the upstream change that
    it collides with; both as lines of a diff without context. A clash that is not
    about lines has neither.
    """

    path: str
    kind: str
    hunk: str = ""
    ours: tuple[str, ...] = ()
    upstream_hunk: str = ""
    theirs: tuple[str, ...] = ()


class Touched(msgspec.Struct, frozen=True):
    """A file that a step changes, and how many lines upstream changed in it
    between the two releases; None where the new release lacks the file."""

    path: str
    upstream_lines: int | None


@dataclass(frozen=True)
class Carried:
    """What became of a step. `tree` is the tree with it, None after a conflict;
    `evidence` says why a step counts as upstream, or what was not exact."""

    verdict: Verdict
    tree: str | None
    evidence: str = ""
    clashes: tuple[Clash, ...] = ()
    files: tuple[Touched, ...] = ()


@dataclass(frozen=True)
class Carrier:
    """Carries steps inside one repository, which must hold both releases.

    Args:
        git: the repository, with a private index.
        scratch: a folder to write in.
        old_base, new_base: the two releases' bases, as commits.
    """

    git: Repository
    scratch: Path
    old_base: str
    new_base: str

    def carry(self, made: StepTree, onto: str) -> Carried:
        """Judge the step of `made` on top of the commit `onto`; nothing moves."""
        step, before = made.step, made.parent
        files = self._upstream_changes(step.touched)
        here = self.git.tree_of(onto)
        merged, conflicts = self._merge(before.commit, made.commit, here)
        if merged == here and made.changed:
            text = "nothing is left of it after the merge"
            return Carried("upstream", here, text, (), files)
        if merged is None:
            if evidence := self._upstream_evidence(made, here):
                return Carried("upstream", here, evidence, (), files)
            found = tuple(self._explained(made, here, conflicts))
            return Carried("conflict", None, "", found, files)
        if self._applies(step.diff, here, reverse=False):
            return Carried("clean", merged, "", (), files)
        text = "its context changed: merged with the upstream changes around it"
        return Carried("merged", merged, text, (), files)

    def commit(self, made: StepTree, tree: str, parent: str) -> str:
        """The carried step as a commit: same names, same text."""
        message = commit_message(made.step).encode()
        return self.git.commit_tree(tree, parent, message)

    def with_files(self, tree: str, files: Mapping[str, bytes]) -> str:
        """`tree` and those of `files` that it lacks."""
        lacking = files.keys() - self.git.files(tree, files).keys()
        if not lacking:
            return tree
        self.git.read_tree(tree)
        self.git.add({path: files[path] for path in lacking}, self.scratch)
        return self.git.write_tree()

    def again(self, commit: str, onto: str) -> str | None:
        """The commit `commit` with another parent; None if they conflict."""
        before = self.git.commit_of(f"{commit}^")
        tree, _ = self._merge(before, commit, self.git.tree_of(onto))
        if tree is None:
            return None
        return self.git.commit_tree(tree, onto, self.git.message(commit))

    def _merge(
        self, ancestor: str, step: str, here: str
    ) -> tuple[str | None, list[Conflict]]:
        """The merged tree, or None and what conflicts."""
        ours = self.git.commit_tree(here, ancestor, b"upstream\n")
        return self.git.merge(ours, step)

    def _applies(self, diff: bytes, tree: str, *, reverse: bool) -> bool:
        """Whether a diff applies with its full context, moved lines allowed."""
        if not diff:
            return True
        self.git.read_tree(tree)
        return self.git.applies(diff, reverse=reverse)

    def _upstream_evidence(self, made: StepTree, here: str) -> str:
        """Why the step's diff counts as upstream's own; empty if it does not."""
        if self.git.files(here, made.added).keys() != set(made.added):
            return ""
        if self._applies(made.step.diff, here, reverse=True):
            return "its diff applies in reverse"
        mine = self._plain(made.parent.commit, made.commit, made.step.touched)
        theirs = self._plain(self.old_base, self.new_base, made.step.touched)
        known = {file.path: file.hunks for file in theirs}
        wanted = [(file.path, hunk) for file in mine for hunk in file.hunks]
        if wanted and all(
            any(_contains(other, hunk) for other in known.get(path, ()))
            for path, hunk in wanted
        ):
            return "upstream's own diff has each of its changes (by patch id)"
        return ""

    def _explained(
        self, made: StepTree, here: str, conflicts: Iterable[Conflict]
    ) -> Iterator[Clash]:
        """Each conflict with both sides and the upstream change behind it."""
        before = made.parent
        for conflict in conflicts:
            mine = self._plain(before.commit, made.commit, [conflict.path])
            theirs = self._plain(before.commit, here, [conflict.path])
            pairs = [
                (one, other)
                for file in mine
                for one in file.hunks
                for rival in theirs
                for other in rival.hunks
                if _collide(one, other)
            ]
            if not pairs:
                yield Clash(conflict.path, conflict.kind)
            for one, other in pairs:
                yield Clash(
                    conflict.path,
                    conflict.kind,
                    one.header,
                    _shown(one),
                    other.header,
                    _shown(other),
                )

    def _plain(self, old: str, new: str, paths: Iterable[str]) -> tuple[FileDiff, ...]:
        """The difference of two trees in some files, without context."""
        return parse_diff(self.git.diff(old, new, paths, context=0))

    def _upstream_changes(self, paths: Iterable[str]) -> tuple[Touched, ...]:
        wanted = tuple(paths)
        present = self.git.files(self.new_base, wanted)
        changed = {
            file.path: file.changed
            for file in self._plain(self.old_base, self.new_base, wanted)
        }
        return tuple(
            Touched(path, changed.get(path, 0) if path in present else None)
            for path in wanted
        )


def carrier(directory: Path, scratch: Path, old_base: str, new_base: str) -> Carrier:
    """A carrier in the git directory `directory`; `scratch` holds its index."""
    git = Repository(directory, index=scratch / "carry-index")
    return Carrier(git, scratch, old_base, new_base)


def _contains(other: Hunk, hunk: Hunk) -> bool:
    """Whether a change holds another one: its lines in a row, on both sides,
    without regard to white space, which is what a patch id compares."""
    for mark in (b"-", b"+"):
        wanted, there = _lines(hunk, mark), _lines(other, mark)
        size = len(wanted)
        if all(there[at : at + size] != wanted for at in range(len(there) - size + 1)):
            return False
    return True


def _lines(hunk: Hunk, mark: bytes) -> list[bytes]:
    return [b"".join(line[1:].split()) for line in hunk.lines if line.startswith(mark)]


def _collide(one: Hunk, other: Hunk) -> bool:
    """Whether two changes of one text touch: they overlap, or no line is between."""
    first = one.old_start + (one.old_count == 0)
    second = other.old_start + (other.old_count == 0)
    return first <= second + other.old_count and second <= first + one.old_count


def _shown(hunk: Hunk) -> tuple[str, ...]:
    lines = [line.decode("utf-8", "replace").rstrip("\n") for line in hunk.lines]
    if len(lines) > SHOWN:
        return (*lines[:SHOWN], f"... {len(lines) - SHOWN} more lines")
    return tuple(lines)
