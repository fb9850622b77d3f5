# SPDX-License-Identifier: Apache-2.0
"""What this repository's own git knows: the user's name, when files changed, and which
version of the tool runs.

The repository is the one in the project's root, never one above it or one that a hook
was started for. In a project that is no git repository the answers are empty.
"""

import io
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from stack.core.errors import EnvironmentProblem
from stack.core.git import DATE, Git
from stack.core.project import Project

TOOL = "xpustack"


def git_setting(project: Project, key: str) -> str:
    """A setting of the user's own configuration of git, such as `user.name`; empty
    where it is not set."""
    return _ask(project, "config", "--get", key, users=True)


def last_change_date(project: Project, path: Path) -> str:
    """The date of a file's last commit, in git's raw format. If the file is not
    committed: the fixed date of every commit of the tool."""
    options = ("--format=%ad", "--date=raw", "--", str(path))
    return _ask(project, "log", "-1", *options) or DATE


def current_commit(project: Project) -> str:
    """The checked-out commit, 12 hexadecimal digits, with `, changed` where tracked
    files differ from it; empty where there is none."""
    name = _ask(project, "rev-parse", "--short=12", "HEAD")
    differs = name and _ask(project, "status", "--porcelain", "--untracked-files=no")
    return f"{name}, changed" if differs else name


def head(project: Project) -> str:
    """The full id of the checked-out commit; empty where there is none."""
    return _ask(project, "rev-parse", "--verify", "--quiet", "HEAD")


def differing(project: Project) -> list[str]:
    """The tracked files that differ from the checked-out commit, in the words of `git
    status`."""
    return _ask(project, "status", "--porcelain", "--untracked-files=no").splitlines()


def commit_that_wrote(project: Project, path: Path, text: str) -> str:
    """The last commit that added `text` to a file; empty where there is none."""
    return _ask(project, "log", "-1", "--format=%H", f"-S{text}", "--", str(path))


def unpack(project: Project, commit: str, folders: Iterable[Path], place: Path) -> None:
    """Write the folders of a project as a commit has them to another place; nothing
    where git does not have them."""
    names = (str(path.relative_to(project.root)) for path in folders)
    # Not a tar: Debian's Python 3.11.2 cannot filter one's members.
    if packed := _run(project, "archive", "--format=zip", commit, "--", *names):
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(place)


def version() -> str:
    """`xpustack 0.1.0`, and in a git checkout its commit and whether files changed."""
    home = Path(__file__).parents[2]
    described = (home / "pyproject.toml").read_text("utf-8")
    number = tomllib.loads(described)["project"]["version"]
    commit = current_commit(Project(home))
    return f"{TOOL} {number} ({commit})" if commit else f"{TOOL} {number}"


def _ask(project: Project, *words: str, users: bool = False) -> str:
    # A name or a file may be in another encoding than UTF-8.
    return _run(project, *words, users=users).decode("utf-8", "replace").strip(" \n")


def _run(project: Project, *words: str, users: bool = False) -> bytes:
    """What git prints; nothing if it fails or is not there."""
    git = Git(project.root / ".git", work_tree=project.root, users=users)
    try:
        return git.run(*words)
    except EnvironmentProblem:
        return b""
