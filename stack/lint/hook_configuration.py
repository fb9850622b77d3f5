# SPDX-License-Identifier: Apache-2.0
"""Read from a base's configuration which of its pre-commit hooks run here."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from stack.core import fingerprint
from stack.core.errors import SourceError

PRE_COMMIT_FILE = ".pre-commit-config.yaml"
_SCRIPT = re.compile(r"python tools/pre_commit/\S+\.py\b")
_MYPY_SCRIPT = "tools/pre_commit/mypy.py"
# mypy runs without these: type stubs and optional packages.
_OPTIONAL = re.compile(r"types-|pydantic$")
_SUFFIXES = {
    "python": (".py",),
    "pyi": (".pyi",),
    "rust": (".rs",),
    "proto": (".proto",),
}


class Hook(msgspec.Struct, frozen=True):
    """A hook as pre-commit's configuration has it."""

    id: str
    entry: str = ""
    language: str = ""
    files: str = ""
    exclude: str = "^$"
    types: tuple[str, ...] = ()
    types_or: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    pass_filenames: bool = True
    additional_dependencies: tuple[str, ...] = ()

    @property
    def script(self) -> list[str]:
        """The base's Python script that takes file names, and its own arguments; empty
        if the hook is something else."""
        python = self.language == "python" and _SCRIPT.match(self.entry)
        return shlex.split(self.entry)[1:] if python and self.pass_filenames else []

    def wanted(self, path: str) -> bool:
        """Whether pre-commit would hand this file to the hook."""
        types = self.types + self.types_or
        suffixes = tuple(each for name in types for each in _SUFFIXES.get(name, ()))
        return (
            re.search(self.files, path) is not None
            and re.search(self.exclude, path) is None
            and (not suffixes or path.endswith(suffixes))
        )


class _Repo(msgspec.Struct):
    repo: str
    hooks: list[Hook]
    rev: str = ""


class _Document(msgspec.Struct):
    repos: list[_Repo]
    exclude: str = "^$"


@dataclass(frozen=True)
class Hooks:
    """The hooks of a base that can run here.

    `ruff` and `typos` are the versions that the base pins (None: not used),
    `exclude` is its pattern of files that no hook sees, `scripts` and `mypy` are
    scripts of the base, `notes` says which hooks do not run here, or run with another
    version, and why.
    """

    ruff: str | None
    typos: str | None
    exclude: str
    scripts: tuple[Hook, ...]
    mypy: Hook | None
    notes: tuple[str, ...]


def read_hooks(tree: Path, release: str) -> Hooks:
    """Read the hooks of the base that is checked out in `tree`.

    Raises:
        SourceError: the base's configuration is missing or not understood.
    """
    path = tree / PRE_COMMIT_FILE
    try:
        document = msgspec.yaml.decode(path.read_bytes(), type=_Document)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise SourceError(
            f"{release} has no readable lint configuration",
            release=release,
            path=PRE_COMMIT_FILE,
            detail=[str(error)],
            hint=f"xpustack apply {release} --to DIR, then read DIR/{PRE_COMMIT_FILE}",
        ) from error
    hooks = [(repo, hook) for repo in document.repos for hook in repo.hooks]
    pinned = {
        hook.id: repo.rev.removeprefix("v")
        for repo, hook in hooks
        if repo.repo != "local"
    }
    notes: list[str] = []
    typos, installed = pinned.get("typos"), fingerprint.installed_version("typos")
    if typos and installed != typos:
        notes.append(f"typos {installed} for the base's {typos}")
    local = [hook for repo, hook in hooks if repo.repo == "local" and hook.script]
    runnable = [hook for hook in local if _can_run(hook, notes)]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Hooks(
        ruff=pinned.get("ruff-check"),
        typos=typos,
        exclude=document.exclude,
        scripts=tuple(hook for hook in runnable if hook.script[0] != _MYPY_SCRIPT),
        # Prefer the hook for this interpreter, then CI's (`manual`) to the local one.
        mypy=max(
            (hook for hook in runnable if hook.script[0] == _MYPY_SCRIPT),
            key=lambda hook: (hook.script[-1] == python, hook.stages == ("manual",)),
            default=None,
        ),
        notes=tuple(dict.fromkeys(notes)),
    )


def _can_run(hook: Hook, notes: list[str]) -> bool:
    """Whether all that a hook needs is installed. A note says what is not, or is of
    another version."""
    missing = []
    for text in hook.additional_dependencies:
        wanted = Requirement(text)
        installed = fingerprint.installed_version(wanted.name)
        if _OPTIONAL.match(wanted.name):
            continue
        if installed is None:
            missing.append(wanted.name)
        elif not wanted.specifier.contains(installed, prereleases=True):
            notes.append(f"{wanted.name} {installed} for the base's {wanted.specifier}")
    if missing:
        notes.append(f"{hook.id} not run: {', '.join(missing)} not installed")
    return not missing
