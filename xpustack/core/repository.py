# SPDX-License-Identifier: Apache-2.0
"""What the tool asks git for: one verb a command, and what it prints as values.

Paths are literal everywhere: no verb takes a pattern.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xpustack.core.errors import EnvironmentProblem
from xpustack.core.git import PLAIN_ATTRIBUTES, Git, GitFailed, way_out

HEADS = "refs/heads/"
PLAIN, EXECUTABLE = "100644", "100755"
MERGE = (
    *("-c", "merge.conflictStyle=diff3", "-c", "merge.directoryRenames=false"),
    *("-c", "merge.renames=true"),
)
"""How steps are merged, in the object store and in a work tree."""

_ABSENT = "000000"
_DIFF = (
    "--full-index",
    "--binary",
    "--no-renames",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--inter-hunk-context=0",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
"""How a diff is made, whatever the person at the keyboard prefers."""
_KIND = re.compile(r"CONFLICT.*\nCONFLICT \(([^)]+)\)")
_MARKER = ": leftover conflict marker"


class Commit(NamedTuple):
    """A commit and the tree that it holds, both as 40-hex ids."""

    id: str
    tree: str


@dataclass(frozen=True)
class Entry:
    """A file of a tree: its mode (such as `100644`) and blob id."""

    mode: str
    blob: str


@dataclass(frozen=True)
class Change:
    """How a path differs between two trees: git's letter for it (A, D, M, or T for
    another kind of file), and the file in each, None where the tree lacks it."""

    path: str
    status: str
    old: Entry | None
    new: Entry | None


@dataclass(frozen=True)
class Logged:
    """A commit as the log tells it: ids, and the message as it was written."""

    id: str
    tree: str
    parents: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class Conflict:
    """A path that a merge cannot settle. `kind` is git's word, such as `content` or
    `modify/delete`."""

    path: str
    kind: str


class NoSuchPath(GitFailed):
    """The tree lacks the path that was asked for."""


@dataclass(frozen=True)
class Repository(Git):
    """Objects, refs and the index of a git directory.

    Trees are named by a tree's or a commit's id, or by a ref. Every verb raises
    GitFailed where git fails and the verb does not say what that means.
    """

    def initialize(self) -> None:
        """Make it: empty, bare if it has no work tree, with attributes that win over
        those in a base."""
        self.directory.mkdir(parents=True, exist_ok=True)
        bare = ["--bare"] if self.work_tree is None else []
        self.run("init", "--quiet", "--template=", "--initial-branch=series", *bare)
        info = self.directory / "info"
        info.mkdir(exist_ok=True)
        (info / "attributes").write_text(PLAIN_ATTRIBUTES, encoding="utf-8")

    # Trees and blobs.

    def blobs(self, ids: Iterable[str]) -> dict[str, bytes]:
        """The contents of the given blobs, read by one process.

        Raises:
            EnvironmentProblem: the repository lacks one of them.
        """
        wanted = list(dict.fromkeys(ids))
        output = self.run(
            "cat-file", "--batch", data="\n".join(wanted).encode() + b"\n"
        )
        found, position = {}, 0
        for name in wanted:
            end = output.index(b"\n", position)
            header = output[position:end].decode().split()
            if header[-1] == "missing":
                raise EnvironmentProblem(
                    f"the repository is damaged: it lacks the object {name}",
                    path=self.directory,
                    hint=way_out(self.directory),
                )
            size = int(header[2])
            found[name] = output[end + 1 : end + 1 + size]
            position = end + size + 2
        return found

    def file(self, tree: str, path: str) -> bytes:
        """The content of a file of a tree.

        Raises:
            NoSuchPath: the tree has no such file.
        """
        arguments = ("cat-file", "blob", f"{tree}:{path}")
        try:
            return self.run(*arguments)
        except GitFailed as error:
            if "does not exist in" not in error.stderr:
                raise
            place, status, stderr = self.directory, error.status, error.stderr
            raise NoSuchPath(place, arguments, status, stderr) from None

    def files(self, tree: str, paths: Iterable[str] | None = None) -> dict[str, Entry]:
        """The files of a tree by path, in git's order: all, or those that `paths`
        name and those in the folders that `paths` name."""
        wanted = None if paths is None else list(paths)
        if wanted == []:
            return {}
        rows = _fields(self.run("ls-tree", "-r", "-z", tree, "--", *(wanted or ())))
        found = {}
        for row in rows:
            properties, _, path = row.partition("\t")
            mode, _, blob = properties.split(" ")
            found[path] = Entry(mode, blob)
        return found

    def changes(self, old: str, new: str) -> list[Change]:
        """The paths at which two trees differ, in git's order. A rename is a file
        that goes and a file that comes."""
        options = ("-r", "-z", "--raw", "--no-renames", "--no-abbrev")
        fields = _fields(self.run("diff-tree", *options, old, new))
        found = []
        for properties, path in zip(fields[::2], fields[1::2], strict=True):
            before, after, *blobs, status = properties.removeprefix(":").split(" ")
            entries = [
                None if mode == _ABSENT else Entry(mode, blob)
                for mode, blob in zip((before, after), blobs, strict=True)
            ]
            found.append(Change(path, status, *entries))
        return found

    def diff(
        self,
        old: str,
        new: str,
        paths: Iterable[str] | None = None,
        *,
        context: int = 3,
    ) -> bytes:
        """The difference of two trees as a patch: of all files, or of those that
        `paths` name. `context` counts the lines around a change."""
        wanted = None if paths is None else list(paths)
        if wanted == []:
            return b""
        return self.run(
            *("diff-tree", "-r", "-p", *_DIFF, f"--unified={context}", old, new),
            *("--", *(wanted or ())),
        )

    def conflict_markers(self, old: str, new: str) -> list[str]:
        """Where `new` has conflict markers that `old` lacks, as `file:line`."""
        try:
            self.run("diff-tree", "-r", "--check", old, new)
        except GitFailed as error:
            lines = error.stdout.decode("utf-8", "replace").splitlines()
            return [
                line.removesuffix(_MARKER) for line in lines if line.endswith(_MARKER)
            ]
        return []

    # The index.

    def read_tree(self, tree: str) -> None:
        """Set the index to a tree."""
        self.run("read-tree", tree)

    def write_tree(self) -> str:
        """The id of the tree that the index holds."""
        return self.text("write-tree")

    def entries(self) -> dict[str, Entry]:
        """The files of the index, by path."""
        found = {}
        for row in _fields(self.run("ls-files", "--stage", "-z")):
            properties, _, path = row.partition("\t")
            mode, blob, _ = properties.split(" ")
            found[path] = Entry(mode, blob)
        return found

    def add(self, files: Mapping[str, bytes], scratch: Path) -> None:
        """Put plain files into the index, by path; `scratch` is a folder to write
        in."""
        names = [scratch / str(number) for number in range(len(files))]
        for name, content in zip(names, files.values(), strict=True):
            name.write_bytes(content)
        ids = self.text(
            *("hash-object", "-w", "--no-filters", "--stdin-paths"),
            data="".join(f"{name}\n" for name in names).encode(),
        ).split()
        self._update(
            f"{PLAIN} {blob}\t{path}" for path, blob in zip(files, ids, strict=True)
        )

    def remove(self, paths: Iterable[str]) -> None:
        """Take files out of the index."""
        self._update(f"0 {'0' * 40}\t{path}" for path in paths)

    def _update(self, rows: Iterable[str]) -> None:
        data = "".join(f"{row}\0" for row in rows).encode()
        self.run("update-index", "-z", "--index-info", data=data)

    def apply(self, diff: bytes) -> None:
        """Apply a diff to the index: with its full context, moved lines allowed.

        Raises:
            GitFailed: it does not fit; `stderr` says where.
        """
        self.run("apply", "--cached", "-", data=diff)

    def applies(self, diff: bytes, *, reverse: bool = False) -> bool:
        """Whether `apply` would apply a diff, or take it back; nothing changes."""
        options = ["--reverse"] if reverse else []
        try:
            self.run("apply", "--cached", "--check", *options, "-", data=diff)
        except GitFailed:
            return False
        return True

    # Commits.

    def commit_tree(self, tree: str, parent: str, message: bytes) -> str:
        """Write a commit of the tool itself, at its fixed date; return its id."""
        return self.text("commit-tree", tree, "-p", parent, data=message)

    def commit_by(
        self, person: str, date: str, tree: str, parent: str, message: str
    ) -> str:
        """Write a commit; return its id, which depends on the arguments alone.

        Args:
            person: author and committer, as `Name <address>`.
            date: in git's raw format.
        """
        content = (
            f"tree {tree}\nparent {parent}\n"
            f"author {person} {date}\ncommitter {person} {date}\n\n{message}"
        )
        options = ("-t", "commit", "-w", "--stdin")
        return self.text("hash-object", *options, data=content.encode())

    def merge(self, ours: str, theirs: str) -> tuple[str | None, list[Conflict]]:
        """Merge two commits: the merged tree, or None and what conflicts."""
        options = ("--write-tree", "-z")
        try:
            merged = self.text(*MERGE, "merge-tree", *options, ours, theirs)
        except GitFailed as error:
            if error.status != 1:
                raise
            return None, list(_conflicts(error.stdout.decode("utf-8", "replace")))
        return merged.split("\0")[0], []

    def commit_of(self, name: str) -> str:
        """The id of the commit that a ref, or git's words for a commit, name."""
        return self.text("rev-parse", "--verify", f"{name}^{{commit}}")

    def tree_of(self, commit: str) -> str:
        """The id of a commit's tree."""
        return self.text("rev-parse", "--verify", f"{commit}^{{tree}}")

    def message(self, commit: str) -> bytes:
        """A commit's message."""
        return self.run("show", "--no-patch", "--format=%B", commit)

    def log(self, old: str, new: str) -> list[Logged]:
        """The commits that `new` has and `old` lacks, parents first.

        Raises:
            SeriesError: a message is not UTF-8.
        """
        output = self.text(
            *("log", "--reverse", "--topo-order", "--format=%H %T %P%n%B%x00"),
            f"{old}..{new}",
        )
        found = []
        for record in output.split("\0")[:-1]:
            identity, _, message = record.lstrip("\n").partition("\n")
            commit, tree, *parents = identity.split()
            found.append(Logged(commit, tree, tuple(parents), message))
        return found

    # Refs and objects.

    def refs(self, folder: str = "refs/") -> dict[str, Commit]:
        """The commits that the refs in `folder` name, by ref. One that names no
        commit has an empty tree."""
        form = "--format=%(refname) %(objectname) %(tree)"
        rows = (
            line.split(" ")
            for line in self.text("for-each-ref", form, folder).splitlines()
        )
        return {ref: Commit(commit, tree) for ref, commit, tree in rows}

    def set_ref(self, ref: str, commit: str) -> None:
        """Let a ref name a commit."""
        self.run("update-ref", ref, commit)

    def delete_refs(self, refs: Iterable[str]) -> None:
        """Delete refs, by one process."""
        orders = "".join(f"delete {ref}\n" for ref in refs)
        self.run("update-ref", "--stdin", data=orders.encode())

    def prune(self, *, packs: bool) -> None:
        """Remove the objects that no ref reaches; those in packs only with `packs`,
        which replaces all packs by a new one."""
        if packs:
            self.run("repack", "-a", "-d", "-q", "--window=0")
        self.run("prune", "--expire=now")

    def fast_import(self, stream: bytes) -> None:
        """Write what a stream for `git fast-import` says, as one pack."""
        self.run("fast-import", "--quiet", "--done", "--depth=0", data=stream)

    def copy_history(self, source: "Repository", commit: str) -> None:
        """Copy a commit and all that it reaches from another repository."""
        pack = source.run(
            *("pack-objects", "--revs", "-q", "--stdout"), data=f"{commit}\n".encode()
        )
        self.run("index-pack", "--stdin", data=pack)


def _fields(output: bytes) -> list[str]:
    """What git ends with zero bytes each."""
    return output.decode("utf-8", "replace").split("\0")[:-1]


def _conflicts(output: str) -> Iterator[Conflict]:
    """What `git merge-tree -z` says about conflicts, one a file."""
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
            yield Conflict(paths[0], kind[1])
