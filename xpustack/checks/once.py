# SPDX-License-Identifier: Apache-2.0
"""A command that passed on the very files of this checkout is not run again.

What counts as the same: the words of the command, every file of the checkout that git
does not ignore, the interpreter, the installed packages, the machine's programs, and
the variables that programs read. If a file changes while the command runs, its success
is not stored.
"""

import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from xpustack.core.cache import Cache
from xpustack.core.checkout import Checkout
from xpustack.core.errors import EnvironmentProblem
from xpustack.core.fingerprint import digest, lock
from xpustack.core.git import GitFailed

AGAIN = "XPUSTACK_AGAIN"
"""Set by a person who wants the command to run whatever is stored."""
SUMMARY = "XPUSTACK_SUMMARY"
"""Names the file into which the command may write one line about its success."""
_READ = (
    "CC",
    "CXX",
    "EMULATED_XPU_",
    "LD_",
    "OCLOC",
    "OMP_",
    "PYTEST_",
    "PYTHON",
    "TORCH",
    "TRITON_",
    "VLLM_",
    "XPUSTACK_",
)
_WITHOUT_EFFECT = {AGAIN, SUMMARY, "XPUSTACK_CACHE"}


class Pass(msgspec.Struct, frozen=True):
    """A success: the command's own line about it, its wall time, when it ended."""

    summary: str
    seconds: float
    ended: str


def key(
    checkout: Path,
    words: Sequence[str],
    programs: Mapping[str, str],
    index: bool = False,
) -> str | None:
    """What the command's success depends on, as one digest; None if git cannot say
    which files count, as outside of a clone.

    Args:
        index: whether the command asks git which files it tracks.
        programs: the machine's programs by name, with their versions.
    """
    repository = Checkout.of(checkout)
    try:
        tracked, untracked = repository.tracked(), repository.untracked()
        git = repository.git_version()
    except GitFailed:
        return None
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ) and name not in _WITHOUT_EFFECT
    }
    return digest(
        result="once",
        git=git,
        files=[
            f"{_content(checkout / name)} {name}"
            for name in sorted(tracked | untracked)
        ],
        tracked=sorted(tracked) if index else [],
        lock=lock(),
        programs=[f"{name} {version}" for name, version in sorted(programs.items())],
        variables=[f"{name}={value}" for name, value in sorted(variables.items())],
        words=words,
    )


def stored(cache: Cache, name: str) -> Pass | None:
    """The success under the key `name`; None if there is none or it is damaged."""
    try:
        return msgspec.convert(cache.results_get(name), Pass)
    except msgspec.ValidationError:
        return None


def run(
    checkout: Path, words: Sequence[str], output: int | None = None
) -> tuple[int, Pass]:
    """Run the command in the checkout, on this process's terminal.

    Args:
        output: the file descriptor in place of its stdout.

    Returns:
        its exit status (128 and its number if a signal ended it), and what there is to
        store if that is 0.

    Raises:
        EnvironmentProblem: there is no such program.
        KeyboardInterrupt: the run was interrupted; the command has ended.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder, "summary")
        try:
            child = subprocess.Popen(
                words,
                cwd=checkout,
                env={**os.environ, SUMMARY: str(summary)},
                stdout=output,
            )
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot start {words[0]}", detail=[str(error)], hint="tox"
            ) from error
        try:
            status = child.wait()
        finally:
            child.terminate()
            child.wait()
        line = summary.read_text().strip() if summary.is_file() else ""
    ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    status = status if status >= 0 else 128 - status
    return status, Pass(line, round(time.monotonic() - begin, 1), ended)


def summarize(line: str) -> None:
    """Print the line that a command ends with, and leave it for `run`."""
    print(line)
    if path := os.environ.get(SUMMARY):
        Path(path).write_text(line)


def _content(path: Path) -> str:
    """Kind and content of a file; a tracked one may be gone."""
    if path.is_symlink():
        return f"link {os.readlink(path)}"
    if not path.is_file():
        return "none"
    executable = os.access(path, os.X_OK)
    return f"{executable} {hashlib.sha256(path.read_bytes()).hexdigest()}"
