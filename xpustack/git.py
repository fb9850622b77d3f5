# SPDX-License-Identifier: Apache-2.0
"""Git as a deterministic tool: no user or system configuration, fixed identity.

Every repository that the tool makes carries an `info/attributes` that wins over
any `.gitattributes` inside a base, so bytes go in and come out as they are.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xpustack.errors import EnvironmentProblem, StackError

IDENTITY = "xpustack <xpustack@localhost>"
DATE = "1767225600 +0000"
"""The date of every commit: 2026-01-01, in git's own format."""

PLAIN_ATTRIBUTES = (
    "* !text !eol !crlf !ident !filter !diff !merge !whitespace"
    " !working-tree-encoding !export-ignore !export-subst\n"
)
DIFF_OPTIONS = (
    "--full-index",
    "--binary",
    "--no-renames",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--unified=3",
    "--inter-hunk-context=0",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
"""How a step's diff is made, whatever the person at the keyboard prefers."""

_SETTINGS = {
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.fileMode": "true",
    "core.symlinks": "true",
    "core.quotePath": "true",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.compression": "1",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "apply.whitespace": "nowarn",
    "apply.ignoreWhitespace": "no",
    "commit.gpgSign": "false",
    "diff.orderFile": "/dev/null",
    "init.defaultBranch": "series",
    "fastimport.unpackLimit": "0",
    "fetch.unpackLimit": "0",
    "safe.directory": "*",
    "protocol.file.allow": "always",
}

_NO_ROOM = (
    "No space left on device",
    "Out of diskspace",
    "Disk quota exceeded",
    "File too large",
)
"""What git says of a full disk; its index writer has words of its own."""


class GitFailed(Exception):
    """A git command ended with a status that its caller has to judge.

    Attributes:
        status: the exit status.
        stderr: what git said, decoded.
        stdout: what it printed nevertheless.
    """

    def __init__(
        self, arguments: Iterable[str], status: int, stderr: str, stdout: bytes = b""
    ) -> None:
        self.command = " ".join(("git", *arguments))
        self.status = status
        self.stderr = stderr
        self.stdout = stdout
        super().__init__(f"{self.command}: exit status {status}: {stderr.strip()}")


@dataclass(frozen=True)
class Git:
    """One git directory, with or without a work tree.

    Args:
        directory: the git directory itself (`store`, or `work/.git`).
        work_tree: the checked-out files, if there are any.
        index: a private index file in place of the repository's own.
    """

    directory: Path
    work_tree: Path | None = None
    index: Path | None = None

    def run(
        self, *arguments: str, data: bytes | None = None, cwd: Path | None = None
    ) -> bytes:
        """Run one git command and return its standard output.

        Raises:
            GitFailed: the command exits with a status other than 0.
            EnvironmentProblem: git is not installed, or the disk is full.
        """
        environment = neutral_environment(os.environ)
        environment["GIT_DIR"] = str(self.directory)
        if self.work_tree is not None:
            environment["GIT_WORK_TREE"] = str(self.work_tree)
        if self.index is not None:
            environment["GIT_INDEX_FILE"] = str(self.index)
        try:
            done = subprocess.run(
                ["git", *arguments],
                input=data,
                stdin=subprocess.DEVNULL if data is None else None,
                capture_output=True,
                env=environment,
                cwd=cwd or self.work_tree or self.directory,
            )
        except FileNotFoundError:
            if shutil.which("git") is None:
                raise EnvironmentProblem(
                    "git is not installed", hint="install git 2.34 or newer"
                ) from None
            raise
        if done.returncode:
            stderr = done.stderr.decode("utf-8", "replace")
            if any(words in stderr for words in _NO_ROOM) or self._full():
                raise EnvironmentProblem(
                    "no room left to write",
                    path=self.directory,
                    detail=stderr,
                    hint=f"df -h {self.directory}",
                )
            raise GitFailed(arguments, done.returncode, stderr, done.stdout)
        return done.stdout

    def _full(self) -> bool:
        """Whether the disk is full: writing a ref, git does not say why it failed."""
        try:
            return shutil.disk_usage(self.directory).free == 0
        except OSError:
            return False

    def text(self, *arguments: str, data: bytes | None = None) -> str:
        """As `run`, decoded from UTF-8 and without the final line feed."""
        return self.run(*arguments, data=data).decode("utf-8").removesuffix("\n")

    def with_index(self, index: Path) -> "Git":
        """The same repository seen through another index file."""
        return Git(self.directory, self.work_tree, index)

    def blobs(self, ids: Iterable[str]) -> dict[str, bytes]:
        """The contents of the given blobs, read by one process.

        Raises:
            StackError: the repository lacks one of them.
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
                raise StackError(
                    f"the object store lacks {name}",
                    path=self.directory,
                    hint=f"rm -r {self.directory}, then run the command again",
                )
            size = int(header[2])
            found[name] = output[end + 1 : end + 1 + size]
            position = end + size + 2
        return found


def neutral_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The environment of every git process: nothing of the user's but PATH and
    the temporary directory, so that results depend on the input alone."""
    name, _, address = IDENTITY.rstrip(">").partition(" <")
    environment = {
        "PATH": outer.get("PATH", os.defpath),
        "HOME": os.devnull,
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
    }
    for role in ("AUTHOR", "COMMITTER"):
        environment[f"GIT_{role}_NAME"] = name
        environment[f"GIT_{role}_EMAIL"] = address
        environment[f"GIT_{role}_DATE"] = DATE
    for number, (key, value) in enumerate(_SETTINGS.items()):
        environment[f"GIT_CONFIG_KEY_{number}"] = key
        environment[f"GIT_CONFIG_VALUE_{number}"] = value
    if "TMPDIR" in outer:
        environment["TMPDIR"] = outer["TMPDIR"]
    return environment


def create(directory: Path, *, bare: bool) -> Git:
    """Make an empty repository: `directory` itself if bare, else `directory/.git`."""
    git_dir = directory if bare else directory / ".git"
    git_dir.mkdir(parents=True, exist_ok=True)
    arguments = ["init", "--quiet", "--template=", "--initial-branch=series"]
    if bare:
        Git(git_dir).run(*arguments, "--bare")
    else:
        Git(git_dir, directory).run(*arguments)
    info = git_dir / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text(PLAIN_ATTRIBUTES, encoding="utf-8")
    return Git(git_dir, None if bare else directory)
