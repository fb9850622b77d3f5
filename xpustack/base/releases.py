# SPDX-License-Identifier: Apache-2.0
"""The pinned releases, read from `releases.toml` and checked against a schema."""

import difflib
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, NoReturn

import msgspec
from packaging.version import InvalidVersion, Version

from xpustack.core.errors import SourceError, UsageError
from xpustack.core.files import read
from xpustack.core.project import Project

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Revision = Annotated[int, msgspec.Meta(ge=1)]


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dependency's version, verbatim as `file` inside the base names it.

    `name` is the distribution's where it is not the usual one: a base's Triton may
    be called `triton-xpu`.
    """

    version: str
    file: str
    name: str = ""

    def __post_init__(self) -> None:
        _require_version(self.version)
        path = PurePosixPath(self.file)
        if not self.file or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"`file`: {self.file!r} is no path inside the base")


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pinned vLLM version: its archive and what it is meant to run with."""

    version: str
    sdist: FileName
    sha256: Sha256
    revision: Revision
    torch: Pin
    triton: Pin
    xpu_kernels: Pin

    def __post_init__(self) -> None:
        _require_version(self.version)

    @property
    def name(self) -> str:
        """The word used everywhere else, such as `v0.22.1`."""
        return f"v{self.version}"


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    release: list[Release]


@dataclass(frozen=True)
class Releases:
    """The pinned releases, oldest first."""

    pinned: tuple[Release, ...]

    def __iter__(self) -> Iterator[Release]:
        return iter(self.pinned)

    def __len__(self) -> int:
        return len(self.pinned)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(release.name for release in self.pinned)

    def __getitem__(self, name: str) -> Release:
        """The release called `name` (`v0.22.1`; a missing `v` is forgiven).

        Raises:
            UsageError: no such pin; the nearest name is suggested.
        """
        wanted = "v" + name.removeprefix("v")
        for release in self.pinned:
            if release.name == wanted:
                return release
        near = [name for name in self.names if name.startswith(wanted + ".")]
        near += difflib.get_close_matches(wanted, self.names, n=1, cutoff=0.5)
        raise UsageError(
            f"{name!r} is not a pinned release"
            + (f"; did you mean {near[0]}?" if near else ""),
            release=name,
            detail=[f"pinned: {', '.join(self.names) or 'none'}"],
            hint=f"xpustack pin {wanted.removeprefix('v')}"
            if is_version(wanted.removeprefix("v"))
            else "xpustack status",
        )


def load(project: Project) -> Releases:
    """Read the project's pins.

    Raises:
        SourceError: the file is missing, is not TOML in UTF-8 or does not fit the
            schema; `path` is `releases.toml:<line>`.
        EnvironmentProblem: the file cannot be read.
    """
    path = project.releases_file
    restore = f"git -C {shlex.quote(str(project.root))} checkout -- {path.name}"
    try:
        content = read(path, project.root, SourceError)
    except FileNotFoundError:
        raise SourceError("the pins are missing", path=path, hint=restore) from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SourceError(
            "the file is not UTF-8",
            path=f"{path}:{line}",
            hint=f"save it as UTF-8, or {restore}",
        ) from None
    return parse(text, path)


def parse(text: str, path: Path) -> Releases:
    """As `load`, for the text of a file that is called `path` in errors."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib carries the place in its message alone until Python 3.14.
        place = re.search(r"at line (\d+)", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        _refuse(path, line, f"not valid TOML: {error}")
    try:
        pinned = msgspec.convert(document, _Document).release
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        _refuse(path, _line_of(text, where.strip("`"), problem), problem)
    for index, (older, newer) in enumerate(pairwise(pinned), start=1):
        if Version(older.version) >= Version(newer.version):
            _refuse(
                path,
                _line_of(text, f"$.release[{index}].version", ""),
                f"{newer.name} must not follow {older.name}:"
                " each release once, oldest first",
            )
    return Releases(tuple(pinned))


def _refuse(path: Path, line: int, problem: str) -> NoReturn:
    raise SourceError(
        problem, path=f"{path}:{line}", hint=f"correct line {line} of {path.name}"
    )


def _line_of(text: str, where: str, problem: str) -> int:
    """The line that msgspec's path `where`, such as `$.release[1].torch.version`,
    names: that of the key, else of the table that should have had it."""
    index = re.search(r"\$\.release\[(\d+)\]", where)
    own = re.search(r"unknown field `(.+)`|^`(\w+)`", problem)
    keys = re.findall(r"\.(\w+)", where)[1:]
    keys += [own[1] or own[2]] if own else []
    table, found = -1, 1
    wanted = int(index[1]) if index else -1
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[\s*release\s*\]\]", line):
            table += 1
            if table == wanted:
                found = number
        if table == wanted and keys:
            key = re.escape(keys[0])
            if re.match(rf"\s*(\[\s*release\.)?[\"']?{key}[\"']?\s*[=.\]]", line):
                return number
    return found


def is_version(text: str) -> bool:
    """Whether `text` is a version in the sense of PEP 440."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _require_version(text: str) -> None:
    if not is_version(text):
        raise ValueError(f"`version`: {text!r} is not a version")
