# SPDX-License-Identifier: Apache-2.0
"""Judges a wheel by making it again, and says file by file what differs.

The wheel, its RECORD, the files beside it, and everything that they name are held
against this checkout: the base's archive, patches, overlay and kernels by hash, the
wheel by building it anew. What a maker says of their own machine cannot be judged;
where it differs from this one it is a note, because it may explain a difference.
"""

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from xpustack.base import releases
from xpustack.base.index import PipConfiguration
from xpustack.base.releases import Release
from xpustack.builds import wheel
from xpustack.core.cache import Cache
from xpustack.core.errors import CheckFailed, StackError, UsageError
from xpustack.core.process import Runner
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.release import inputs, provenance
from xpustack.release.constraints import with_hashes
from xpustack.release.provenance import Statement
from xpustack.release.ship import (
    BESIDE,
    PINS,
    PROVENANCE,
    Derived,
    derive,
    known_hashes,
)

_LOCAL = re.compile(r"xpu\.dsv4\.([1-9]\d*)")


@dataclass(frozen=True)
class Difference:
    """One file that is not what this checkout makes: its name in the wheel, beside
    it or in this repository, what is wrong, and further lines."""

    path: str
    problem: str
    detail: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.path}: {self.problem}", *self.detail])


@dataclass(frozen=True)
class Verdict:
    """The outcome: no differences, or each of them; notes blame nobody."""

    wheel: Path
    release: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.differences


def verify(
    project: Project,
    cache: Cache,
    path: Path,
    *,
    offline: bool = False,
    progress: Progress = silent,
) -> Verdict:
    """Hold a wheel and the files beside it against this checkout.

    Raises:
        UsageError: there is no such file, or it is no wheel of this stack, or one
            of a release or revision that this checkout does not have.
        StackError: the machine cannot build, such as for want of a compiler.
    """
    release = _release(project, path)
    progress(f"reading {path.name}")
    given = wheel.read(path)
    found = [
        Difference(name or path.name, problem)
        for name, problem in given.problems.items()
    ]
    if "" not in given.problems:
        problems = wheel.record_problems(given)
        found += [
            Difference(name or path.name, problem)
            for name, problem in problems.items()
            if name not in given.problems
        ]
    statement = _statement(path, found)
    runner = Runner()
    notes: list[str] = []
    if statement is not None:
        found += _beside(path, statement)
        found += _inputs(project, release, statement)
        notes += _notes("machine", statement.machine, inputs.machine(runner))
        notes += _notes("tool", statement.tool, inputs.tool())
    try:
        made = derive(
            runner, project, cache, release, offline=offline, progress=progress
        )
    except StackError as error:
        # What this machine lacks says nothing about the wheel.
        if error.exit_code not in (1, 3, 4):
            raise
        found.append(
            Difference("series", "it cannot be built again", tuple(_lines(error)))
        )
    else:
        found += _members(path, given, made)
        files = _expected(path, made, statement, offline, notes)
        found += _files(path, files)
    return Verdict(path, release.name, _merged(found), tuple(notes))


def _release(project: Project, path: Path) -> Release:
    """The pinned release that the wheel's name names."""
    if not path.is_file():
        raise UsageError(
            "there is no such wheel", path=path, hint="xpustack build RELEASE"
        )
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise UsageError(
            "not the name of a wheel", path=path, detail=str(error)
        ) from None
    own = _LOCAL.fullmatch(version.local or "")
    if name != "vllm" or own is None:
        raise UsageError(
            "not a wheel of a whole series of this stack",
            path=path,
            detail="expected vllm-<release>+xpu.dsv4.<revision>-....whl",
            hint="xpustack build RELEASE",
        )
    release = releases.load(project)[f"v{version.public}"]
    if release.revision != int(own[1]):
        raise UsageError(
            f"the wheel is of revision {own[1]}, this checkout makes revision"
            f" {release.revision}",
            release=release.name,
            path=path,
            hint="git log -p releases.toml, then check out the one that made it",
        )
    return release


def _statement(path: Path, found: list[Difference]) -> Statement | None:
    try:
        return provenance.read((path.parent / PROVENANCE).read_bytes())
    except FileNotFoundError:
        found.append(Difference(PROVENANCE, "missing beside the wheel"))
    except CheckFailed as error:
        found.append(Difference(PROVENANCE, error.message, error.detail))
    return None


def _beside(path: Path, statement: Statement) -> Iterator[Difference]:
    """What the provenance names and what lies there."""
    for name, told in statement.subjects.items():
        file = path.parent / name
        if name not in (path.name, *BESIDE):
            yield Difference(PROVENANCE, f"it is the provenance of {name}")
        elif not file.is_file():
            yield Difference(name, "missing beside the wheel")
        else:
            actual = inputs.sha256_of(file.read_bytes())
            if actual != told:
                yield Difference(
                    name, "not the file that the provenance names", _both(told, actual)
                )
    if path.name not in statement.subjects:
        yield Difference(PROVENANCE, f"it does not name {path.name}")


def _inputs(
    project: Project, release: Release, statement: Statement
) -> Iterator[Difference]:
    """What the provenance says that the wheel is made of, and this checkout."""
    for part in statement.inputs:
        kind = part.annotations.get("kind")
        if kind == "base":
            actual = release.sha256 if part.name == release.sdist else "another"
        elif kind in ("series", "patch", "overlay", "kernel"):
            file = project.root / part.name
            inside = project.root.resolve() in file.resolve().parents
            if not inside or not file.is_file():
                yield Difference(part.name, "the wheel has it, this checkout does not")
                continue
            actual = inputs.sha256_of(file.read_bytes())
        else:
            continue
        if actual != part.sha256:
            yield Difference(
                part.name,
                "not the one that the wheel was built from",
                _both(part.sha256, actual),
            )


def _members(path: Path, given: wheel.Wheel, made: Derived) -> Iterator[Difference]:
    """The wheel against the one that was just built."""
    if path.name != made.name:
        yield Difference(path.name, f"this checkout calls it {made.name}")
    expected = wheel.read(io.BytesIO(made.data)).members
    for name in sorted({*given.members, *expected} - {*given.problems}):
        if name not in expected:
            yield Difference(name, "only the wheel has it")
        elif name not in given.members:
            if "" not in given.problems:
                yield Difference(name, "the wheel lacks it")
        elif given.members[name] != expected[name]:
            yield Difference(
                name,
                "differs from the one built here",
                _unlike(given.members[name].data, expected[name].data),
            )


def _expected(
    path: Path,
    made: Derived,
    statement: Statement | None,
    offline: bool,
    notes: list[str],
) -> dict[str, bytes]:
    """The files as they should be, given what only their maker can know."""
    runner = Runner()
    pins = path.parent / PINS
    if not offline:
        hashed = with_hashes(made.pins, PipConfiguration.of_this_machine().index())
    else:
        text = pins.read_text("utf-8", "replace") if pins.is_file() else ""
        hashed = known_hashes(made.pins, text)
        notes.append(f"--offline: the hashes in {PINS} are taken as they are")
    tool = statement.tool if statement else inputs.tool()
    machine = statement.machine if statement else inputs.machine(runner)
    return made.files(hashed, tool, machine)


def _files(path: Path, files: Mapping[str, bytes]) -> Iterator[Difference]:
    """The wheel's own bytes and the files beside it against those made here."""
    for name, expected in files.items():
        file = path if name.endswith(".whl") else path.parent / name
        if not file.is_file():
            yield Difference(name, "missing beside the wheel")
            continue
        actual = file.read_bytes()
        if actual != expected:
            what = "the archive's bytes differ" if file == path else "differs"
            yield Difference(
                file.name, f"{what} from what is made here", _unlike(actual, expected)
            )


def _merged(found: list[Difference]) -> tuple[Difference, ...]:
    """One entry a file: the first problem, the others as further lines."""
    by_path: dict[str, Difference] = {}
    for one in found:
        before = by_path.get(one.path)
        if before is None:
            by_path[one.path] = one
        elif one.problem != before.problem:
            lines = (*before.detail, one.problem, *one.detail)
            by_path[one.path] = Difference(one.path, before.problem, lines)
    return tuple(by_path.values())


def _notes(
    what: str, told: Mapping[str, str], here: Mapping[str, str]
) -> Iterator[str]:
    for name in sorted({*told, *here}):
        if told.get(name) != here.get(name):
            there, this = (each.get(name, "none")[:60] for each in (told, here))
            yield f"{what}: {name} was {there}, here it is {this}"


def _unlike(actual: bytes, expected: bytes) -> tuple[str, ...]:
    """Where two contents part: the first line that differs, else the hashes."""
    try:
        ours, theirs = expected.decode().splitlines(), actual.decode().splitlines()
    except UnicodeDecodeError:
        ours = theirs = []
    for number, (left, right) in enumerate(zip(ours, theirs, strict=False), start=1):
        if left != right:
            return (
                f"line {number} as made here: {left[:160]}",
                f"line {number} as it is:     {right[:160]}",
            )
    return _both(inputs.sha256_of(expected), inputs.sha256_of(actual))


def _both(expected: str, actual: str) -> tuple[str, ...]:
    return (f"expected sha256 {expected}", f"actual sha256   {actual}")


def _lines(error: StackError) -> list[str]:
    return [line.strip() for line in str(error).splitlines()]
