# SPDX-License-Identifier: Apache-2.0
"""Carrying one step to another release's tree by a 3-way merge, and judging it.

The merge's common ancestor is the tree on which the step was made, one side is
that tree with the step, the other the tree it is to land on. `refresh` alone may
merge; everywhere else a patch fits exactly or not at all.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from xpustack.core.git import DIFF_OPTIONS, Git, GitFailed
from xpustack.series.apply import Tree, commit_message
from xpustack.series.diff import FileDiff, Hunk, parse_diff

Verdict = Literal["clean", "merged", "conflict", "upstream"]
SHOWN = 12
"""Lines of one side of a conflict that a report shows at most."""

_KIND = re.compile(r"CONFLICT.*\nCONFLICT \(([^)]+)\)")
MERGE = (
    *("-c", "merge.conflictStyle=diff3", "-c", "merge.directoryRenames=false"),
    *("-c", "merge.renames=true"),
)


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
        old_base, new_base: the two releases' bases, as commits.
    """

    git: Git
    old_base: str
    new_base: str

    def carry(self, made: Tree, onto: str) -> Carried:
        """Judge the step of `made` on top of the commit `onto`; nothing moves."""
        step, before = made.step, made.parent
        assert step is not None and before is not None
        files = self._upstream_changes(step.touched)
        here = self.git.text("rev-parse", f"{onto}^{{tree}}")
        merged, clashes = self._merge(before.commit, made.commit, here)
        if merged == here and made.changed:
            text = "nothing is left of it after the merge"
            return Carried("upstream", here, text, (), files)
        if merged is None:
            if evidence := self._upstream_evidence(made, before, here):
                return Carried("upstream", here, evidence, (), files)
            found = tuple(self._explained(made, before, here, clashes))
            return Carried("conflict", None, "", found, files)
        if self._applies(step.diff, here, reverse=False):
            return Carried("clean", merged, "", (), files)
        text = "its context changed: merged with the upstream changes around it"
        return Carried("merged", merged, text, (), files)

    def commit(self, made: Tree, tree: str, parent: str) -> str:
        """The carried step as a commit: same names, same text."""
        assert made.step is not None
        message = commit_message(made.step).encode()
        return self.git.text("commit-tree", tree, "-p", parent, data=message)

    def with_files(self, tree: str, files: Mapping[str, bytes]) -> str:
        """`tree` and those of `files` that it lacks."""
        lacking = sorted(set(files) - self._listed(tree, tuple(files)))
        if not lacking:
            return tree
        entries = []
        for path in lacking:
            blob = self.git.text("hash-object", "-w", "--stdin", data=files[path])
            entries.append(f"100644 {blob}\t{path}\n")
        self.git.run("read-tree", tree)
        self.git.run("update-index", "--index-info", data="".join(entries).encode())
        return self.git.text("write-tree")

    def again(self, commit: str, onto: str) -> str | None:
        """The commit `commit` with another parent; None if they conflict."""
        here = self.git.text("rev-parse", f"{onto}^{{tree}}")
        before = self.git.text("rev-parse", f"{commit}^")
        tree, _ = self._merge(before, commit, here)
        if tree is None:
            return None
        message = self.git.run("show", "--no-patch", "--format=%B", commit)
        return self.git.text("commit-tree", tree, "-p", onto, data=message)

    def _merge(
        self, ancestor: str, step: str, here: str
    ) -> tuple[str | None, list[tuple[str, str]]]:
        """The merged tree, or None with (path, kind of conflict)."""
        ours = self.git.text("commit-tree", here, "-p", ancestor, data=b"upstream\n")
        command = [*MERGE, "merge-tree", "--write-tree", "-z", ours, step]
        try:
            return self.git.text(*command).split("\0")[0], []
        except GitFailed as error:
            if error.status != 1:
                raise
            return None, list(_conflicts(error.stdout.decode("utf-8", "replace")))

    def _applies(self, diff: bytes, tree: str, *, reverse: bool) -> bool:
        """Whether a diff applies with its full context, moved lines allowed."""
        if not diff:
            return True
        self.git.run("read-tree", tree)
        options = ["--cached", "--check", *(["--reverse"] if reverse else [])]
        try:
            self.git.run("apply", *options, "-", data=diff)
        except GitFailed:
            return False
        return True

    def _upstream_evidence(self, made: Tree, before: Tree, here: str) -> str:
        """Why the step's diff counts as upstream's own; empty if it does not."""
        assert made.step is not None
        if not self._has(here, made.added):
            return ""
        if self._applies(made.step.diff, here, reverse=True):
            return "its diff applies in reverse"
        mine = self._plain(before.commit, made.commit, made.step.touched)
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
        self, made: Tree, before: Tree, here: str, clashes: list[tuple[str, str]]
    ) -> Iterator[Clash]:
        """Each conflict with both sides and the upstream change behind it."""
        for path, kind in clashes:
            mine = self._plain(before.commit, made.commit, [path])
            theirs = self._plain(before.commit, here, [path])
            pairs = [
                (one, other)
                for file in mine
                for one in file.hunks
                for rival in theirs
                for other in rival.hunks
                if _collide(one, other)
            ]
            if not pairs:
                yield Clash(path, kind)
            for one, other in pairs:
                yield Clash(
                    path,
                    kind,
                    one.header,
                    _shown(one),
                    other.header,
                    _shown(other),
                )

    def _plain(self, old: str, new: str, paths: Iterable[str]) -> tuple[FileDiff, ...]:
        """The difference of two trees in some files, without context."""
        wanted = list(paths)
        if not wanted:
            return ()
        command = ["diff-tree", "-r", "-p", *DIFF_OPTIONS, "--unified=0", old, new]
        diff = self.git.run("--literal-pathspecs", *command, "--", *wanted)
        return parse_diff(diff)

    def _upstream_changes(self, paths: Iterable[str]) -> tuple[Touched, ...]:
        wanted = tuple(paths)
        present = self._listed(self.new_base, wanted)
        changed = {
            file.path: file.changed
            for file in self._plain(self.old_base, self.new_base, wanted)
        }
        return tuple(
            Touched(path, changed.get(path, 0) if path in present else None)
            for path in wanted
        )

    def _has(self, tree: str, paths: Iterable[str]) -> bool:
        wanted = tuple(paths)
        return self._listed(tree, wanted) == set(wanted)

    def _listed(self, tree: str, paths: tuple[str, ...]) -> set[str]:
        if not paths:
            return set()
        command = ["ls-tree", "-r", "-z", "--name-only", tree, "--", *paths]
        listing = self.git.run("--literal-pathspecs", *command)
        return set(listing.decode("utf-8", "replace").split("\0")[:-1])


def carrier(directory: Path, scratch: Path, old_base: str, new_base: str) -> Carrier:
    """A carrier in the git directory `directory`; `scratch` holds its index."""
    return Carrier(Git(directory, None, scratch / "carry-index"), old_base, new_base)


def _conflicts(output: str) -> Iterator[tuple[str, str]]:
    """What `git merge-tree -z` says about conflicts, one pair a file."""
    fields = iter(output.split("\0")[1:])
    for field in fields:
        if not field:
            break
    seen = set()
    for count in fields:
        if not count:
            return
        paths = [next(fields) for _ in range(int(count))]
        kind = _KIND.match(next(fields) + "\n" + next(fields))
        if kind is not None and paths[0] not in seen:
            seen.add(paths[0])
            yield paths[0], kind[1]


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
