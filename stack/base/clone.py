# SPDX-License-Identifier: Apache-2.0
"""A contributor's git clone of vLLM, which is only read.

It is read through a *view*, a repository of the tool that borrows the objects of the
clone and of the store. So none of the clone's configuration, hooks and remotes takes
part, and nothing is fetched behind its owner's back.
"""

import contextlib
import difflib
import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stack.base.releases import Release
from stack.base.store import Store, base_ref
from stack.core.errors import StackError, UsageError, command
from stack.core.git import Git, GitFailed
from stack.core.repository import HEADS, Commit, Repository

UPSTREAM = "https://github.com/vllm-project/vllm.git"
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_REMOTES = "refs/remotes/"
_SHOWN = 5
"""The most commits that are named for one place."""


@dataclass(frozen=True)
class Clone:
    """A commit of a clone.

    Attributes:
        place: the clone as the user named it.
        git: its git directory; a linked work tree has one of its own.
        view: the repository that borrows its objects.
        ref: the revision as asked for.
    """

    place: Path
    git: Repository
    view: Repository
    ref: str
    commit: str
    tree: str

    def base(self, store: Store, like: Release) -> tuple[Release, Commit]:
        """The commit as a release, whose pins and version are those of `like`, and as a
        base of the store, without its history."""
        digest = hashlib.sha256(f"clone {self.commit}".encode()).hexdigest()
        version = f"{like.version}+g{self.commit[:12]}"
        release = msgspec.structs.replace(
            like, version=version, sdist=f"g{self.commit}", sha256=digest
        )
        ref = base_ref(release)
        if ref not in store.commits([ref]):
            store.cache.progress(f"importing {self.ref} of {self.place}")
            with store.writing() as writer:
                writer.copy_history(self.view, [self.tree])
                commit = writer.text("commit-tree", self.tree, data=b"")
                writer.set_ref(ref, commit)
        return release, store.commits([ref])[ref]

    def since(self, release: Release) -> str | None:
        """Where the history of the commit parted from a release's tag; None if the
        clone does not say."""
        try:
            return self.git.text("merge-base", f"refs/tags/{release.name}", self.commit)
        except GitFailed:
            return None

    def commits(
        self, since: str, path: str, lines: tuple[int, int] | None = None
    ) -> tuple[str, ...]:
        """The commits after `since` that changed a file, the newest first, each with
        its subject.

        Args:
            lines: only these lines of the file, by the first and their number. In a
                clone without old files git fails; then of the whole file.
        """
        form = ("log", "-s", f"--max-count={_SHOWN}", "--format=%h %s")
        span = f"{since}..{self.commit}"
        if lines is not None and lines[1] > 0:
            first, count = lines
            place = f"-L{first},{first + count - 1}:{path}"
            with contextlib.suppress(GitFailed):
                return self._subjects(*form, place, span)
        return self._subjects(*form, span, "--", path)

    def _subjects(self, *words: str) -> tuple[str, ...]:
        # A commit need not say in which encoding it is.
        return tuple(self.view.run(*words).decode("utf-8", "replace").splitlines())


@contextlib.contextmanager
def opened(store: Store, text: str) -> Iterator[Clone]:
    """The commit that `CLONE[:REF]` names, by default the one that is checked out.

    Raises:
        UsageError: there is no clone or no such commit, it is not vLLM, or a partial
            clone lacks files of it.
    """
    place, ref = _split(text)
    git = Repository(_git_directory(place))
    commit, tree = _commit(git, place, ref)
    with _sparing(place), store.cache.scratch() as scratch:
        view = Repository(scratch / "view")
        view.initialize()
        common = git.text("rev-parse", "--path-format=absolute", "--git-common-dir")
        shared = Path(common)
        lenders = [shared / "objects", store.git.directory / "objects"]
        (view.directory / "objects/info/alternates").write_text(
            "".join(f"{folder}\n" for folder in lenders if folder.is_dir())
        )
        shallow = shared / "shallow"
        if shallow.is_file():
            shutil.copyfile(shallow, view.directory / "shallow")
        _require_files(view, place, ref, tree)
        yield Clone(place, git, view, ref, commit, tree)


@contextlib.contextmanager
def _sparing(place: Path) -> Iterator[None]:
    """Let no error advise to remove a clone, which its owner's work is in."""
    try:
        yield
    except GitFailed as error:
        error.hint = command("git", "-C", place, "fsck")
        raise


def _split(text: str) -> tuple[Path, str]:
    """Path and revision; a folder's name may hold a colon."""
    path, colon, ref = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), "HEAD"
    return Path(path), ref


def _git_directory(place: Path) -> Path:
    """The git directory of a clone, of a linked work tree, or of a bare repository.

    Raises:
        UsageError: there is none.
    """
    folder = place.absolute()
    directory = folder / ".git" if (folder / ".git").exists() else folder
    git = Git(directory, work_tree=folder)
    problem = "there is no git repository"
    with contextlib.suppress(StackError, OSError):
        if git.text("rev-parse", "--show-object-format") == "sha1":
            return Path(git.text("rev-parse", "--absolute-git-dir"))
        problem = "the repository names its objects by SHA-256, vLLM's by SHA-1"
    raise UsageError(
        problem,
        path=place,
        hint=command("git", "clone", UPSTREAM, "DIR") + ", then --onto DIR",
    )


def _commit(git: Repository, place: Path, ref: str) -> tuple[str, str]:
    """The commit `ref` and its tree.

    Raises:
        UsageError: the clone has none of that name, or it is no commit of vLLM.
    """
    with contextlib.suppress(GitFailed):
        commit = git.commit_of(_branch_first(git, ref))
        tree = git.tree_of(commit)
        if git.files(tree, ["vllm/__init__.py"]):
            return commit, tree
        raise UsageError(
            f"{ref} is not vLLM: it has no vllm/__init__.py",
            path=place,
            hint=command("git", "-C", place, "log", "-1", "--stat", ref),
        )
    names = [name.split("/", 2)[2] for name in git.refs() if name.count("/") > 1]
    near = difflib.get_close_matches(ref, names, n=1)
    fetch = command("git", "-C", place, "fetch", UPSTREAM, ref)
    raise UsageError(
        f"the clone has no commit {ref}"
        + (f"; did you mean {near[0]}?" if near else ""),
        path=place,
        hint=f"{fetch}, then --onto {place}:FETCH_HEAD",
    )


def _branch_first(git: Repository, ref: str) -> str:
    """A revision by its full name if it begins with a branch's. Git itself would take
    a tag of that name, though `git switch` takes the branch."""
    name = re.split("[~^@:]", ref, maxsplit=1)[0]
    for kind in (HEADS, _REMOTES):
        if name != "HEAD" and kind + name in git.refs(kind + name):
            return kind + ref
    return ref


def _require_files(view: Repository, place: Path, ref: str, tree: str) -> None:
    """Require that all files of a tree are there.

    Raises:
        UsageError: a partial clone lacks some; the error names the command that
            fetches them at once.
    """
    options = ("--objects", "--no-object-names", "--missing=print")
    listed = view.text("rev-list", *options, tree).splitlines()
    lacking = [line for line in listed if line.startswith("?")]
    if lacking:
        raise UsageError(
            f"the clone is partial: it lacks {len(lacking)} objects of {ref}",
            path=place,
            hint=command(*("git", "-C", place, "diff", "--shortstat", _EMPTY_TREE, ref))
            + " fetches them, then the same command again",
        )
