# SPDX-License-Identifier: Apache-2.0
"""A repository with its files on disk: the tool's own, or one that a person edits."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from stack.core.cache import Cache, atomic_dir
from stack.core.git import GitFailed
from stack.core.repository import MERGE, Repository

_UNFINISHED = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD")
_MAIL_OPTIONS = (
    "--quiet",
    "--numbered",
    "--no-signature",
    "--full-index",
    "--binary",
    "--no-renames",
)


@dataclass(frozen=True)
class Checkout(Repository):
    """A repository whose files are in the folder `work_tree`."""

    work_tree: Path = field(kw_only=True)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The repository in `folder`, which need not exist yet."""
        return cls(folder / ".git", work_tree=folder)

    def configure(self, settings: Mapping[str, str]) -> None:
        """Write settings into the repository's own configuration."""
        for key, value in settings.items():
            self.run("config", key, value)

    # Files.

    def check_out(self, tree: str) -> None:
        """Make the index and its files those of a tree, whatever they were. Files that
        are the same are not written, those that git does not know stay."""
        self.run("read-tree", "--reset", "-u", tree)

    def clean(self) -> None:
        """Remove the files that git does not know, ignored ones, too."""
        self.run("clean", "-ffdxq")

    def status(self, *, ignored: bool = False) -> list[str]:
        """The uncommitted changes in the words of `git status`, one line per path."""
        options = ["--ignored"] if ignored else []
        return self.text(
            "status", "--porcelain", "--untracked-files=all", *options
        ).splitlines()

    def tracked(self) -> set[str]:
        """The paths of all files that git tracks. One may be gone from the disk."""
        return self._files("--cached", "--deduplicate")

    def untracked(self) -> set[str]:
        """The paths of all files that git neither tracks nor ignores."""
        return self._files("--others", "--exclude-standard")

    def _files(self, *options: str) -> set[str]:
        output = self.run("ls-files", "-z", *options)
        return {os.fsdecode(name) for name in output.split(b"\0")[:-1]}

    def git_version(self) -> str:
        """The version of the git that answers here, in its own words."""
        return self.text("version")

    def unfinished(self) -> list[str]:
        """The operations, such as a rebase, that a person began here and did not
        finish, by the names of git's files about them."""
        return [name for name in _UNFINISHED if (self.directory / name).exists()]

    def stage(self, path: str) -> None:
        """Add a file to the index as it is on disk."""
        self.run("add", "--", path)

    # The branch that is checked out.

    def head(self) -> str | None:
        """The ref of the branch that is checked out; None if none is."""
        try:
            return self.text("symbolic-ref", "HEAD")
        except GitFailed:
            return None

    def set_head(self, ref: str) -> None:
        """Make a branch the one that is checked out; index and files stay."""
        self.run("symbolic-ref", "HEAD", ref)

    def reset(self, commit: str) -> None:
        """Make branch, index and files those of a commit."""
        self.run("reset", "--quiet", "--hard", commit)

    def cherry_pick(self, commit: str) -> None:
        """Commit what a commit changed on top of the branch; where that conflicts,
        leave it in progress."""
        try:
            self.run(*MERGE, "cherry-pick", commit)
        except GitFailed as error:
            if error.status != 1:
                raise

    # Series of commits.

    def fetch(self, source: Path, *refspecs: str, shallow: bool = False) -> None:
        """Copy refs, and what they reach, from the repository `source`; of a shallow
        copy the commits themselves alone."""
        options = ["--depth=1"] if shallow else []
        self.run("fetch", "--quiet", "--no-tags", *options, str(source), *refspecs)

    def range_diff(self, old: tuple[str, str], new: tuple[str, str]) -> bytes:
        """How two series of commits differ, each given by its base and its tip."""
        ranges = ("..".join(series) for series in (old, new))
        return self.run("range-diff", "--no-color", *ranges)

    def format_patches(self, without: Iterable[str], tip: str, directory: Path) -> None:
        """Write each commit up to `tip` that none of `without` has as a mail for `git
        am` into `directory`. The file names sort in the order of the commits."""
        target = ("--output-directory", str(directory))
        lacking = [f"^{commit}" for commit in without]
        self.run("format-patch", *_MAIL_OPTIONS, *target, tip, *lacking)


def check_out(cache: Cache, tree: str, directory: Path) -> None:
    """Write the files of a tree of the cache's store to `directory`, new or empty,
    which appears only when complete.

    Raises:
        EnvironmentProblem: the disk is full, or writing there is denied.
    """
    with atomic_dir(directory) as temporary, cache.scratch() as scratch:
        index = scratch / "index"
        Checkout(cache.objects, work_tree=temporary, index=index).check_out(tree)
