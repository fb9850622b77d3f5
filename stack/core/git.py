# SPDX-License-Identifier: Apache-2.0
"""Git as a deterministic tool: no user or system configuration, fixed identity.

Every repository that the tool makes has an `info/attributes` that overrides any
`.gitattributes` inside a base, so that git never converts a file's bytes.
"""

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stack.core.errors import EnvironmentProblem, SeriesError

OLDEST = (2, 38)
"""The oldest git that has `git merge-tree --write-tree`, which `refresh` needs."""

IDENTITY = "xpustack <xpustack@localhost>"
DATE = "1767225600 +0000"
"""The date of every commit: 2026-01-01, in git's own format."""

PLAIN_ATTRIBUTES = (
    "* !text !eol !crlf !ident !filter !diff !merge !whitespace"
    " !working-tree-encoding !export-ignore !export-subst\n"
)
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
    "log.showSignature": "false",
    "log.follow": "false",
    "init.defaultBranch": "series",
    "fastimport.unpackLimit": "0",
    "fetch.unpackLimit": "0",
    "safe.directory": "*",
    "protocol.file.allow": "always",
}

_REPOSITORY = frozenset(
    f"GIT_{name}"
    for name in (
        *("DIR", "COMMON_DIR", "WORK_TREE", "INDEX_FILE", "NAMESPACE"),
        *("OBJECT_DIRECTORY", "ALTERNATE_OBJECT_DIRECTORIES", "CONFIG"),
    )
)
"""The variables that choose a repository, which git exports to hooks."""

_SHOWN = 10
_COMMAND = 200
"""How many lines of git's output, and characters of its command line, an error
shows."""

_NO_ROOM = (
    "No space left on device",
    "Out of diskspace",
    "Disk quota exceeded",
    "File too large",
)
"""Git's messages about a full disk; its index writer has its own."""


class GitFailed(EnvironmentProblem):
    """A git command failed. A caller that knows the reason catches this error; if
    none does, the repository is probably damaged, and the message says so.

    Attributes:
        status: the exit status.
        stderr: git's messages, decoded.
        stdout: its output up to the failure.
    """

    def __init__(
        self,
        directory: Path,
        arguments: Iterable[str],
        status: int,
        stderr: str,
        stdout: bytes = b"",
    ) -> None:
        command = shlex.join(("git", *arguments))
        self.status = status
        self.stderr = stderr
        self.stdout = stdout
        super().__init__(
            "git cannot work with the repository: is it damaged?",
            path=directory,
            detail=[
                *stderr.strip().splitlines()[:_SHOWN],
                f"exit status {status} of {command[:_COMMAND]}",
            ],
            hint=way_out(directory),
        )


def way_out(directory: Path) -> str:
    """The hint for a damaged repository. The store can be deleted and made again; a
    work repository may hold a person's work."""
    place = shlex.quote(str(directory))
    if directory.name == ".git":
        place = shlex.quote(str(directory.parent))
        return f"git -C {place} fsck; or xpustack apply RELEASE --to a new directory"
    return f"rm -rf {place}, then the same command again makes it anew"


@dataclass(frozen=True)
class Git:
    """Git, started on one git directory, with or without a work tree.

    Args:
        directory: the git directory itself (`store`, or `work/.git`).
        work_tree: the checked-out files, if there are any.
        index: a private index file in place of the repository's own.
        users: whether the user's own configuration takes part.
    """

    directory: Path
    work_tree: Path | None = field(default=None, kw_only=True)
    index: Path | None = field(default=None, kw_only=True)
    users: bool = field(default=False, kw_only=True)

    def run(
        self, *arguments: str, data: bytes | Iterable[bytes] | None = None
    ) -> bytes:
        """Run one git command and return its standard output.

        Args:
            data: its standard input; or the parts of it, for a command that prints
                next to nothing before it has read all. It reads them while the later
                ones are made, and is killed if they cannot be.

        Raises:
            GitFailed: the command exits with a status other than 0.
            EnvironmentProblem: git is not installed or too old, or the disk is full.
        """
        program = _program(os.environ.get("PATH", os.defpath))
        chosen = users_environment if self.users else neutral_environment
        environment = chosen(os.environ)
        environment["GIT_DIR"] = str(self.directory)
        if self.work_tree is not None:
            environment["GIT_WORK_TREE"] = str(self.work_tree)
        if self.index is not None:
            environment["GIT_INDEX_FILE"] = str(self.index)
        with subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=self.work_tree or self.directory,
        ) as process:
            try:
                if data is not None and not isinstance(data, bytes):
                    assert process.stdin is not None, "it reads a pipe"
                    # If it ends early, its exit status says why.
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.writelines(data)
                    data = None
                output, messages = process.communicate(data)
            except BaseException:
                process.kill()
                process.wait()
                # Closing it later would write what is left, and hide this error.
                with contextlib.suppress(BrokenPipeError):
                    if process.stdin is not None:
                        process.stdin.close()
                raise
        if process.returncode:
            stderr = messages.decode("utf-8", "replace")
            if any(words in stderr for words in _NO_ROOM) or self._full():
                raise EnvironmentProblem(
                    "the disk is full",
                    path=self.directory,
                    detail=stderr,
                    hint=f"df -h {shlex.quote(str(self.directory))}",
                )
            raise GitFailed(
                self.directory, arguments, process.returncode, stderr, output
            )
        return output

    def _full(self) -> bool:
        """Whether the disk is full: git fails to write a ref without saying why."""
        try:
            return shutil.disk_usage(self.directory).free == 0
        except OSError:
            return False

    def tracks(self, path: Path) -> bool:
        """Whether git knows a file, so that it can take back an edit or a removal; it
        does not where there is no repository."""
        try:
            self.run("ls-files", "--error-unmatch", "--", str(path))
        except EnvironmentProblem:
            return False
        return True

    def text(self, *arguments: str, data: bytes | None = None) -> str:
        """As `run`, decoded from UTF-8 and without the final line feed.

        Raises:
            SeriesError: a message or a file name is in another encoding.
        """
        output = self.run(*arguments, data=data)
        try:
            return output.decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            line = output[output.rfind(b"\n", 0, error.start) + 1 :].splitlines()[0]
            raise SeriesError(
                "a message or a file name in the repository is not UTF-8",
                path=self.work_tree or self.directory,
                detail=[f"the line {line.decode('utf-8', 'backslashreplace')}"],
                hint="git rebase -i base there, and write it in UTF-8",
            ) from None


@functools.cache
def _program(path: str) -> str:
    """The git on the search path `path`, after a check of its version.

    Raises:
        EnvironmentProblem: there is none, or it is older than `OLDEST`.
    """
    oldest = ".".join(map(str, OLDEST))
    program = shutil.which("git", path=path)
    if program is None:
        raise EnvironmentProblem(
            "git is not installed", hint=f"install git {oldest} or newer"
        )
    process = subprocess.run([program, "version"], capture_output=True, check=False)
    output = process.stdout.decode("utf-8", "replace").strip()
    version = re.search(r"(\d+)\.(\d+)", output)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise EnvironmentProblem(
            f"git {oldest} or newer is needed",
            path=program,
            detail=[output or process.stderr.decode("utf-8", "replace").strip()],
            hint=f"install git {oldest} or newer, first on PATH",
        )
    return program


def users_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The environment of a git process that asks for the user's own settings: all of
    the user's but what chooses a repository."""
    return {name: value for name, value in outer.items() if name not in _REPOSITORY}


def neutral_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The environment of every other git process. Of the user's own it keeps only
    PATH and the temporary directory, so that results depend on the input alone."""
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
        "GIT_LITERAL_PATHSPECS": "1",
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
