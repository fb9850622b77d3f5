# SPDX-License-Identifier: Apache-2.0
"""The pinned releases, read from `releases.toml` and checked against a schema."""

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, NoReturn

import msgspec
from packaging.version import InvalidVersion, Version

from stack.core.errors import SourceError, UsageError, meant
from stack.core.files import read_file
from stack.core.project import Project

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Revision = Annotated[int, msgspec.Meta(ge=1)]
Content = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dependency's version, verbatim as `file` inside the base names it.

    `name` is the distribution's name if it is not the usual one: Triton may be called
    `triton-xpu`.
    """

    version: str
    file: str
    name: str = ""

    def __post_init__(self) -> None:
        _require_version(self.version)
        path = PurePosixPath(self.file)
        if not self.file or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"`file`: {self.file!r} is no path inside the base")


class Numbered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vLLM version that a name is made of."""

    version: str

    def __post_init__(self) -> None:
        _require_version(self.version)

    @property
    def name(self) -> str:
        """The name used everywhere else, such as `v0.22.1`."""
        return f"v{self.version}"

    @property
    def minor(self) -> tuple[int, ...]:
        """The numbers that name its minor release, such as `(0, 22)`."""
        return Version(self.version).release[:2]


class Release(Numbered, frozen=True, forbid_unknown_fields=True):
    """A pinned vLLM version: its archive and its main dependencies.

    Attributes:
        content: a digest of what `revision` holds; empty while none is recorded.
        kept: why the release is supported although it is older than the window;
            empty for one that leaves with the window.
    """

    sdist: FileName
    sha256: Sha256
    revision: Revision
    torch: Pin
    triton: Pin
    xpu_kernels: Pin
    content: Content = ""
    kept: str = ""


class Retired(Numbered, frozen=True, forbid_unknown_fields=True):
    """A release that is not supported any more.

    Attributes:
        commit: the last commit of this repository that has its series.
    """

    commit: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    release: list[Release]
    window: Annotated[int, msgspec.Meta(ge=1)] = 3
    retired: list[Retired] = []


@dataclass(frozen=True)
class Releases:
    """The pinned releases, oldest first.

    Attributes:
        window: how many of the newest minors are supported.
        retired: the releases that were supported once, oldest first.
    """

    pinned: tuple[Release, ...]
    window: int = 3
    retired: tuple[Retired, ...] = ()

    def __iter__(self) -> Iterator[Release]:
        return iter(self.pinned)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(release.name for release in self.pinned)

    def has_version(self, version: str) -> bool:
        """Whether a version is pinned, however it is written: `1.0` is `1.0.0`."""
        return any(Version(each.version) == Version(version) for each in self)

    @property
    def newest(self) -> Release:
        return self.pinned[-1]

    @property
    def outside_window(self) -> tuple[Release, ...]:
        """The pins that are older than the newest minors of the window, and that no
        reason keeps."""
        minors = sorted({release.minor for release in self.pinned})[-self.window :]
        return tuple(
            release
            for release in self.pinned
            if release.minor not in minors and not release.kept
        )

    def retired_release(self, name: str) -> Retired | None:
        """The retired release called `name` (`v0.22.1`; the `v` may be left out); None
        if no such release is retired."""
        full_name = "v" + name.removeprefix("v")
        return next((old for old in self.retired if old.name == full_name), None)

    def __getitem__(self, name: str) -> Release:
        """The release called `name` (`v0.22.1`; the `v` may be left out).

        Raises:
            UsageError: no such pin; the nearest name is suggested.
        """
        full_name = "v" + name.removeprefix("v")
        for release in self.pinned:
            if release.name == full_name:
                return release
        if (retired := self.retired_release(name)) is not None:
            raise UsageError(
                "the release is retired: this commit has no series of it",
                release=retired.name,
                detail=[
                    f"supported: {', '.join(self.names)}",
                    f"the last commit that has it: {retired.commit}",
                ],
                hint=f"xpustack build {retired.name} builds its wheel from that commit;"
                f" for all else: git worktree add DIR {retired.commit[:12]}",
            )
        matches = [name for name in self.names if name.startswith(full_name + ".")]
        whole = not matches and is_version(full_name.removeprefix("v"))
        matches += difflib.get_close_matches(full_name, self.names, n=1, cutoff=0.5)
        raise UsageError(
            f"{name!r} is not a pinned release"
            + (f"; did you mean {matches[0]}?" if matches else ""),
            release=name,
            detail=[f"pinned: {', '.join(self.names) or 'none'}"],
            hint=f"xpustack pin {full_name.removeprefix('v')}"
            if whole
            else "xpustack status",
            again=meant(name, matches[0]) if matches and not whole else None,
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
        content = read_file(path, project.root, SourceError)
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
    return parse_releases(text, path)


def parse_releases(text: str, path: Path) -> Releases:
    """As `load`, for a given text; errors name `path` as its file."""
    try:
        document = msgspec.toml.decode(text, type=_Document)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        _refuse(path, _line_of(text, where.strip("`"), problem), problem)
    except msgspec.DecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        _refuse(path, line, f"not valid TOML: {error}")
    tables: tuple[tuple[str, Sequence[Release | Retired]], ...] = (
        ("release", document.release),
        ("retired", document.retired),
    )
    for table, entries in tables:
        for index, (older, newer) in enumerate(pairwise(entries), start=1):
            if Version(older.version) >= Version(newer.version):
                _refuse(
                    path,
                    _line_of(text, f"$.{table}[{index}].version", ""),
                    f"{newer.name} must not follow {older.name}:"
                    " each release once, oldest first",
                )
    names = {release.name for release in document.release}
    for index, old in enumerate(document.retired):
        if old.name in names:
            line = _line_of(text, f"$.retired[{index}].version", "")
            _refuse(path, line, f"{old.name} is pinned and retired: it is one of both")
    return Releases(tuple(document.release), document.window, tuple(document.retired))


def _refuse(path: Path, line: int, problem: str) -> NoReturn:
    raise SourceError(
        problem, path=f"{path}:{line}", hint=f"correct line {line} of {path.name}"
    )


def _line_of(text: str, where: str, problem: str) -> int:
    """The line number for msgspec's path `where`, such as
    `$.release[1].torch.version`: the key's line, else that of the table that should
    have it."""
    index = re.search(r"\$\.(release|retired)\[(\d+)\]", where)
    field = re.search(r"unknown field `(.+)`|^`(\w+)`", problem)
    keys = re.findall(r"\.(\w+)", where)[1:]
    keys += [field[1] or field[2]] if field else []
    table, table_line = -1, 1
    name, target = (index[1], int(index[2])) if index else ("release", -1)
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(rf"\s*\[\[\s*{name}\s*\]\]", line):
            table += 1
            if table == target:
                table_line = number
        if table == target and keys:
            key = re.escape(keys[0])
            if re.match(rf"\s*(\[\s*{name}\.)?[\"']?{key}[\"']?\s*[=.\]]", line):
                return number
    return table_line


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
