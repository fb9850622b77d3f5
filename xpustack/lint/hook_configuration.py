# SPDX-License-Identifier: Apache-2.0
"""Read from a base's configuration which of its pre-commit hooks run here."""

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from xpustack.core import fingerprint
from xpustack.core.errors import SourceError

PRE_COMMIT_FILE = ".pre-commit-config.yaml"
_SCRIPT = re.compile(r"python (tools/pre_commit/\S+\.py)\b")
_MYPY_SCRIPT = "tools/pre_commit/mypy.py"
# mypy runs without these: type stubs and optional packages.
_OPTIONAL = re.compile(r"types-|pydantic$")
_SUFFIXES = {
    "python": (".py",),
    "pyi": (".pyi",),
    "rust": (".rs",),
    "proto": (".proto",),
}


class _Hook(msgspec.Struct):
    id: str
    entry: str = ""
    language: str = ""
    files: str = ""
    exclude: str = "^$"
    types: list[str] = []
    types_or: list[str] = []
    stages: list[str] = []
    pass_filenames: bool = True
    additional_dependencies: list[str] = []


class _Repo(msgspec.Struct):
    repo: str
    hooks: list[_Hook]
    rev: str = ""


class _Document(msgspec.Struct):
    repos: list[_Repo]
    exclude: str = "^$"


@dataclass(frozen=True)
class Script:
    """A hook that is a Python script of the base and takes file names."""

    name: str
    arguments: tuple[str, ...]
    files: str
    exclude: str
    suffixes: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """The requirements of the hook's own environment."""

    def wanted(self, path: str) -> bool:
        """Whether pre-commit would hand this file to the hook."""
        return (
            re.search(self.files, path) is not None
            and re.search(self.exclude, path) is None
            and (not self.suffixes or path.endswith(self.suffixes))
        )


@dataclass(frozen=True)
class Hooks:
    """The hooks of a base that can run here.

    `ruff` and `typos` are the versions that the base pins (None: not used),
    `exclude` is its pattern of files that no hook sees, `notes` says which hooks do
    not run here, or run with another version, and why.
    """

    ruff: str | None
    typos: str | None
    exclude: str
    scripts: tuple[Script, ...]
    mypy: Script | None
    notes: tuple[str, ...] = field(default=())

    def visible(self, paths: Iterable[str]) -> list[str]:
        return [path for path in paths if re.search(self.exclude, path) is None]


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
    notes: list[str] = []
    pinned = {
        hook.id: repo.rev.removeprefix("v")
        for repo in document.repos
        for hook in repo.hooks
        if repo.repo != "local"
    }
    typos = pinned.get("typos")
    if typos and fingerprint.installed_version("typos") != typos:
        notes.append(
            f"typos {fingerprint.installed_version('typos')} for the base's {typos}"
        )
    mypy_scripts: list[tuple[bool, bool, Script]] = []
    scripts: list[Script] = []
    for hook in (h for r in document.repos if r.repo == "local" for h in r.hooks):
        script = _script(hook)
        if script is None:
            continue
        missing = _missing(hook, notes)
        if missing:
            notes.append(f"{hook.id} not run: {', '.join(missing)} not installed")
        elif script.arguments[0] == _MYPY_SCRIPT:
            python = f"{sys.version_info.major}.{sys.version_info.minor}"
            mypy_scripts.append(
                (python == script.arguments[-1], hook.stages == ["manual"], script)
            )
        else:
            scripts.append(script)
    return Hooks(
        ruff=pinned.get("ruff-check"),
        typos=typos,
        exclude=document.exclude,
        scripts=tuple(scripts),
        # Prefer the hook for this interpreter, then CI's (`manual`) to the local one.
        mypy=(
            max(mypy_scripts, key=lambda candidate: candidate[:2])[2]
            if mypy_scripts
            else None
        ),
        notes=tuple(dict.fromkeys(notes)),
    )


def _script(hook: _Hook) -> Script | None:
    match = _SCRIPT.match(hook.entry)
    if hook.language != "python" or match is None or not hook.pass_filenames:
        return None
    types = hook.types + hook.types_or
    return Script(
        name=hook.id,
        arguments=tuple(shlex.split(hook.entry)[1:]),
        files=hook.files,
        exclude=hook.exclude,
        suffixes=tuple(suffix for name in types for suffix in _SUFFIXES.get(name, ())),
        packages=tuple(hook.additional_dependencies),
    )


def _missing(hook: _Hook, notes: list[str]) -> list[str]:
    """The hook's dependencies that are absent. A note names another version."""
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
    return missing
