# SPDX-License-Identifier: Apache-2.0
"""The git commands that the tool uses: one method per command, with typed results.

Paths are literal: no method takes a pattern.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stack.core.errors import EnvironmentProblem
from stack.core.git import (
    DATE,
    IDENTITY,
    PLAIN_ATTRIBUTES,
    Git,
    GitFailed,
    way_out,
)

HEADS = "refs/heads/"
PLAIN, EXECUTABLE = "100644", "100755"
MERGE = (
    "-c",
    "merge.conflictStyle=diff3",
    "-c",
    "merge.directoryRenames=false",
    "-c",
    "merge.renames=true",
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
"""The options of every diff, so that the user's configuration has no effect."""
_KIND = re.compile(r"CONFLICT.*\nCONFLICT \(([^)]+)\)")
_MARKER = ": leftover conflict marker"


class Commit(NamedTuple):
    """A commit and the tree that it holds, both as 40-hex ids."""

    id: str
    tree: str


@dataclass(frozen=True)
class TreeEntry:
    """A file of a tree: its mode (such as `100644`) and blob id."""

    mode: str
    blob: str


@dataclass(frozen=True)
class Change:
    """How a path differs between two trees: git's status letter (A, D, M, or T for
    another kind of file), and the file in each tree, None where it is absent."""

    path: str
    status: str
    old: TreeEntry | None
    new: TreeEntry | None


@dataclass(frozen=True)
class LogEntry:
    """A commit in a log: its ids, and its message verbatim."""

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

    A tree argument is the id of a tree or a commit, or a ref. Every method raises
    GitFailed when git fails, unless its docstring says otherwise.
    """

    def initialize(self) -> None:
        """Create the empty repository, bare if it has no work tree, with attributes
        that override those in a base."""
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
        names = list(dict.fromkeys(ids))
        output = self.run("cat-file", "--batch", data="\n".join(names).encode() + b"\n")
        contents, position = {}, 0
        for name in names:
            end = output.index(b"\n", position)
            header = output[position:end].decode().split()
            if header[-1] == "missing":
                raise EnvironmentProblem(
                    f"the repository is damaged: it lacks the object {name}",
                    path=self.directory,
                    hint=way_out(self.directory),
                )
            size = int(header[2])
            contents[name] = output[end + 1 : end + 1 + size]
            position = end + size + 2
        return contents

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

    def files(
        self, tree: str, paths: Iterable[str] | None = None
    ) -> dict[str, TreeEntry]:
        """The files of a tree by path, in git's order: all files, or only those at or
        below `paths`."""
        selected = None if paths is None else list(paths)
        if selected == []:
            return {}
        rows = _fields(self.run("ls-tree", "-r", "-z", tree, "--", *(selected or ())))
        entries = {}
        for row in rows:
            properties, _, path = row.partition("\t")
            mode, _, blob = properties.split(" ")
            entries[path] = TreeEntry(mode, blob)
        return entries

    def changes(self, old: str, new: str) -> list[Change]:
        """The paths at which two trees differ, in git's order. A rename is a deletion
        and an addition."""
        options = ("-r", "-z", "--raw", "--no-renames", "--no-abbrev")
        fields = _fields(self.run("diff-tree", *options, old, new))
        changes = []
        for properties, path in zip(fields[::2], fields[1::2], strict=True):
            before, after, *blobs, status = properties.removeprefix(":").split(" ")
            entries = [
                None if mode == _ABSENT else TreeEntry(mode, blob)
                for mode, blob in zip((before, after), blobs, strict=True)
            ]
            changes.append(Change(path, status, *entries))
        return changes

    def diff(
        self,
        old: str,
        new: str,
        paths: Iterable[str] | None = None,
        *,
        context: int = 3,
    ) -> bytes:
        """The difference of two trees as a patch: of all files, or only those at or
        below `paths`. `context` is the number of lines around a change."""
        selected = None if paths is None else list(paths)
        if selected == []:
            return b""
        options = (*_DIFF, f"--unified={context}")
        return self.run(
            "diff-tree", "-r", "-p", *options, old, new, "--", *(selected or ())
        )

    def conflict_markers(self, old: str, new: str) -> list[str]:
        """The places, as `file:line`, of the conflict markers that `new` has and `old`
        lacks."""
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

    def add(self, files: Mapping[str, bytes], scratch: Path) -> None:
        """Add plain files to the index, by path; `scratch` is a folder for temporary
        files."""
        names = [scratch / str(number) for number in range(len(files))]
        for name, content in zip(names, files.values(), strict=True):
            name.write_bytes(content)
        options = ("-w", "--no-filters", "--stdin-paths")
        paths = "".join(f"{name}\n" for name in names).encode()
        ids = self.text("hash-object", *options, data=paths).split()
        self._update(
            f"{PLAIN} {blob}\t{path}" for path, blob in zip(files, ids, strict=True)
        )

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files from the index."""
        self._update(f"0 {'0' * 40}\t{path}" for path in paths)

    def _update(self, rows: Iterable[str]) -> None:
        data = "".join(f"{row}\0" for row in rows).encode()
        self.run("update-index", "-z", "--index-info", data=data)

    def apply(self, diff: bytes) -> None:
        """Apply a diff to the index. Its full context must match; offsets are allowed.

        Raises:
            GitFailed: the diff does not fit; `stderr` says where.
        """
        self.run("apply", "--cached", "-", data=diff)

    def applies(self, diff: bytes, *, reverse: bool = False) -> bool:
        """Whether a diff, or its reverse, applies to the index; nothing changes."""
        options = ["--reverse"] if reverse else []
        try:
            self.run("apply", "--cached", "--check", *options, "-", data=diff)
        except GitFailed:
            return False
        return True

    # Commits.

    def commit_tree(
        self,
        tree: str,
        parent: str,
        message: str,
        person: str = IDENTITY,
        date: str = DATE,
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
        """Merge two commits; return the merged tree, or None and the conflicts."""
        options = ("--write-tree", "-z")
        try:
            output = self.text(*MERGE, "merge-tree", *options, ours, theirs)
        except GitFailed as error:
            if error.status != 1:
                raise
            return None, list(_conflicts(error.stdout.decode("utf-8", "replace")))
        return output.split("\0")[0], []

    def merge_texts(self, ours: Path, base: Path, theirs: Path) -> bytes | None:
        """Merge the texts of three files; None where both sides changed the same
        lines."""
        try:
            return self.run("merge-file", "--stdout", *map(str, (ours, base, theirs)))
        except GitFailed as error:
            # Its exit status counts the conflicts.
            if not 0 < error.status < 128:
                raise
            return None

    def commit_of(self, name: str) -> str:
        """The id of the commit that `name`, a ref or any git revision, names."""
        return self.text("rev-parse", "--verify", f"{name}^{{commit}}")

    def tree_of(self, commit: str) -> str:
        """The id of a commit's tree."""
        return self.text("rev-parse", "--verify", f"{commit}^{{tree}}")

    def log(self, old: str, new: str) -> list[LogEntry]:
        """The commits that `new` has and `old` lacks, parents first.

        Raises:
            SeriesError: a message is not UTF-8.
        """
        options = ("--reverse", "--topo-order", "--format=%H %T %P%n%B%x00")
        output = self.text("log", *options, f"{old}..{new}")
        commits = []
        for record in output.split("\0")[:-1]:
            identity, _, message = record.lstrip("\n").partition("\n")
            commit, tree, *parents = identity.split()
            commits.append(LogEntry(commit, tree, tuple(parents), message))
        return commits

    # Refs and objects.

    def refs(self, folder: str = "refs/") -> dict[str, Commit]:
        """The commits that the refs in `folder` name, by ref. If a ref names an object
        that is no commit, its tree is empty."""
        form = "--format=%(refname) %(objectname) %(tree)"
        rows = (
            line.split(" ")
            for line in self.text("for-each-ref", form, folder).splitlines()
        )
        return {ref: Commit(commit, tree) for ref, commit, tree in rows}

    def commits(self, refs: Iterable[str]) -> dict[str, Commit]:
        """The commits that the given refs name, by ref, without the refs that are not
        there, or whose commit or tree is lost. Reads these refs alone, in one git
        process."""
        names = list(dict.fromkeys(refs))
        asked = "".join(f"{ref}^{{commit}}\n{ref}^{{tree}}\n" for ref in names)
        lines = self.run("cat-file", "--batch-check=%(objectname)", data=asked.encode())
        ids = iter(lines.decode().splitlines())
        found = zip(names, ids, ids, strict=True)
        return {
            ref: Commit(commit, tree)
            for ref, commit, tree in found
            if not (commit.endswith(" missing") or tree.endswith(" missing"))
        }

    def set_ref(self, ref: str, commit: str) -> None:
        """Set a ref to a commit."""
        self.run("update-ref", ref, commit)

    def set_refs(self, commits: Mapping[str, str]) -> None:
        """Set refs to commits, in one git process."""
        commands = "".join(f"update {ref} {to}\n" for ref, to in commits.items())
        self.run("update-ref", "--stdin", data=commands.encode())

    def delete_refs(self, refs: Iterable[str]) -> None:
        """Delete refs, in one git process."""
        commands = "".join(f"delete {ref}\n" for ref in refs)
        self.run("update-ref", "--stdin", data=commands.encode())

    def prune(self, *, packs: bool) -> None:
        """Remove the objects that no ref reaches. Those in packs are removed only with
        `packs`, which replaces all packs by a new one."""
        if packs:
            self.run("repack", "-a", "-d", "-q", "--window=0")
        self.run("prune", "--expire=now")

    def fast_import(self, stream: Iterable[bytes]) -> None:
        """Import the parts of a `git fast-import` stream as one pack."""
        self.run("fast-import", "--quiet", "--done", "--depth=0", data=stream)

    def copy_history(
        self, source: "Repository", commits: Iterable[str], without: Iterable[str] = ()
    ) -> None:
        """Copy commits and everything they reach from another repository, but not what
        the commits `without` reach."""
        wanted = [*commits, *(f"^{commit}" for commit in without)]
        pack = source.run(
            *("pack-objects", "--revs", "-q", "--stdout"),
            data="".join(f"{revision}\n" for revision in wanted).encode(),
        )
        self.run("index-pack", "--stdin", data=pack)


def _fields(output: bytes) -> list[str]:
    """The fields of an output in which each ends with a zero byte."""
    return output.decode("utf-8", "replace").split("\0")[:-1]


def _conflicts(output: str) -> Iterator[Conflict]:
    """The conflicts in the output of `git merge-tree -z`, one per file."""
    fields = iter(output.split("\0")[1:])
    for field in fields:
        if not field:
            break
    conflict_paths = set()
    for count in fields:
        if not count:
            return
        paths = [next(fields) for _ in range(int(count))]
        kind = _KIND.match(next(fields) + "\n" + next(fields))
        if kind is not None and paths[0] not in conflict_paths:
            conflict_paths.add(paths[0])
            yield Conflict(paths[0], kind[1])
