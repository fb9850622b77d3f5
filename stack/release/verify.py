# SPDX-License-Identifier: Apache-2.0
"""Verify a wheel by building it again, and list the files that differ.

The wheel, its RECORD, the files beside it, and everything that they name are compared
with this checkout: the base's archive, patches, overlay and kernels by hash, the wheel
by building it anew. The provenance's record of the builder's machine cannot be
verified. Where that machine differs from this one, a note says so, because that may
explain a difference.
"""

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from stack.base import releases
from stack.base.releases import Release
from stack.builds import wheel
from stack.core.cache import Cache
from stack.core.errors import CheckFailed, StackError, UsageError, command
from stack.core.process import Runner
from stack.core.project import RELEASES_FILE, Project
from stack.release import inputs, provenance
from stack.release.inputs import WheelBuild
from stack.release.provenance import Statement
from stack.release.resource import sha256_of
from stack.release.ship import (
    PINS,
    PROVENANCE,
    build_release_wheel,
    files,
    with_announced_hashes,
    with_pins,
    with_written_hashes,
)

BUNDLE = "attestation.sigstore.json"
"""What the release workflow signs, beside a published wheel."""
_LOCAL = re.compile(r"xpu\.dsv4\.([1-9]\d*)")


@dataclass(frozen=True)
class Difference:
    """A file that differs from what this checkout makes: its name in the wheel, beside
    it or in this repository, the problem, and further lines."""

    file: str
    problem: str
    detail: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.file}: {self.problem}", *self.detail])


@dataclass(frozen=True)
class WheelVerdict:
    """The verdict on a wheel: all differences; `notes` may explain them."""

    wheel: Path
    release: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.differences


def verify(project: Project, cache: Cache, path: Path) -> WheelVerdict:
    """Compare a wheel and the files beside it with this checkout.

    Raises:
        UsageError: there is no such file, or it is not a wheel of this stack, or of
            a release or revision that this checkout does not have.
        StackError: the machine cannot build, for example without a compiler.
    """
    release = _release(project, path)
    cache.progress(f"reading {path.name}")
    wheel_file = wheel.read(path)
    problems = dict(wheel_file.problems)
    if "" not in problems:
        problems = wheel.record_problems(wheel_file) | problems
    differences = [
        Difference(name or path.name, problem) for name, problem in problems.items()
    ]
    differences += _owner(path, wheel_file)
    statement = _statement(path, release, differences)
    runner = Runner()
    notes = [_attestation(path)]
    if statement is not None:
        differences += _inputs(project, release, statement)
        notes += _notes("machine", statement.machine, inputs.machine(runner))
        notes += _notes("tool", statement.tool, inputs.tool())
    try:
        rebuild = build_release_wheel(runner, project, cache, release)
    except StackError as error:
        # What this machine lacks says nothing about the wheel.
        if error.exit_code not in (1, 3, 4):
            raise
        differences.append(
            Difference(
                "series",
                "it cannot be built again",
                tuple(line.strip() for line in str(error).splitlines()),
            )
        )
    else:
        differences += _members(path, wheel_file, rebuild)
        expected = _as_recorded(cache, path, rebuild, statement, notes)
        differences += _files(path, files(expected))
    return WheelVerdict(path, release.name, tuple(differences), tuple(notes))


def _release(project: Project, path: Path) -> Release:
    """The pinned release that the wheel's name names."""
    if not path.is_file():
        raise UsageError(
            "there is no such wheel", path=path, hint="xpustack build RELEASE"
        )
    version = _version(path)
    own = None if version is None else _LOCAL.fullmatch(version.local or "")
    if version is None or own is None:
        raise UsageError(
            "not a wheel of a whole series of this stack",
            path=path,
            detail="expected vllm-<release>+xpu.dsv4.<revision>-....whl",
            hint="xpustack build RELEASE",
        )
    pinned, name = releases.load(project), f"v{version.public}"
    if name not in pinned:
        raise _not_made_here(pinned, path, name, own[1])
    release = pinned[name]
    if release.revision != int(own[1]):
        raise UsageError(
            f"the wheel is of revision {own[1]}, this checkout makes revision"
            f" {release.revision}",
            release=release.name,
            path=path,
            hint="git log -p releases.toml, then check out the one that made it",
        )
    return release


def _not_made_here(
    pinned: releases.Releases, path: Path, name: str, revision: str
) -> UsageError:
    """The error about the wheel of a release that the checkout does not pin."""
    retired = pinned.retired_release(name)
    if retired is not None:
        state = "is retired"
        add = command("git", "worktree", "add", "DIR", retired.commit[:12])
        hint = f"{add}, the last commit that has it; then the same command with -C DIR"
    else:
        state = "is not a pinned release of this checkout"
        log = ("git", "log", "--oneline", f'-Sversion = "{name.removeprefix("v")}"')
        hint = (
            f"{command(*log, '--', RELEASES_FILE)} names the commits that pinned it and"
            " took it out: check out one between them"
        )
    return UsageError(
        f"the wheel is of {name}, revision {revision}, which {state}",
        release=name,
        path=path,
        detail=[f"pinned: {', '.join(pinned.names)}"],
        hint=hint,
    )


def _version(path: Path) -> Version | None:
    """The version in the name of a wheel of vLLM; None if it is none."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename:
        return None
    return version if name == "vllm" else None


def _owner(path: Path, wheel_file: wheel.Wheel) -> Iterator[Difference]:
    """What the wheel says that it is, where its file's name says something else."""
    metadata, named = wheel_file.metadata, _version(path)
    inside = f"{metadata.get('name')} {metadata.get('version')}"
    if metadata and inside != f"vllm {named}":
        yield Difference(path.name, f"by its METADATA it is the wheel of {inside}")


def _attestation(path: Path) -> str:
    """The note on who made the wheel, which a build cannot tell."""
    if (path.parent / BUNDLE).is_file():
        return f"{BUNDLE} is not checked: docs/deploying.md says how sigstore does that"
    return f"no workflow attests this wheel: no {BUNDLE} beside it"


def _statement(
    path: Path, release: Release, differences: list[Difference]
) -> Statement | None:
    try:
        return provenance.read((path.parent / PROVENANCE).read_bytes())
    except FileNotFoundError:
        where = f"a published wheel's files are in {release.name}.tar.gz beside it"
        differences.append(Difference(PROVENANCE, "missing beside the wheel", (where,)))
    except CheckFailed as error:
        differences.append(Difference(PROVENANCE, error.message, error.detail))
    return None


def _inputs(
    project: Project, release: Release, statement: Statement
) -> Iterator[Difference]:
    """The provenance's list of inputs against this checkout's files."""
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
            actual = sha256_of(file.read_bytes())
        else:
            continue
        if actual != part.sha256:
            yield Difference(
                part.name,
                "not the one that the wheel was built from",
                _hash_lines(part.sha256, actual),
            )


def _members(
    path: Path, wheel_file: wheel.Wheel, rebuild: WheelBuild
) -> Iterator[Difference]:
    """The wheel against the one that was just built."""
    if path.name != rebuild.name:
        yield Difference(path.name, f"this checkout calls it {rebuild.name}")
    expected = wheel.read(io.BytesIO(rebuild.data)).members
    for name in sorted({*wheel_file.members, *expected} - {*wheel_file.problems}):
        if name not in expected:
            yield Difference(name, "only the wheel has it")
        elif name not in wheel_file.members:
            if "" not in wheel_file.problems:
                yield Difference(name, "the wheel lacks it")
        elif wheel_file.members[name] != expected[name]:
            yield Difference(
                name,
                "differs from the one built here",
                _first_difference(wheel_file.members[name].data, expected[name].data),
            )


def _as_recorded(
    cache: Cache,
    path: Path,
    rebuild: WheelBuild,
    statement: Statement | None,
    notes: list[str],
) -> WheelBuild:
    """The build with the statement's own record of tool and machine, and with hashes:
    the announced ones, or offline those that `pins.txt` has."""
    if statement is not None:
        rebuild = replace(rebuild, tool=statement.tool, machine=statement.machine)
    if not cache.offline:
        return with_announced_hashes(rebuild)
    notes.append(f"--offline: the hashes in {PINS} are taken as they are")
    pins = path.parent / PINS
    text = pins.read_text("utf-8", "replace") if pins.is_file() else ""
    return with_pins(rebuild, with_written_hashes(rebuild.runtime.pins, text))


def _files(path: Path, made: Mapping[str, bytes]) -> Iterator[Difference]:
    """The wheel's own bytes and the files beside it against those made here."""
    for name, expected in made.items():
        file = path if name.endswith(".whl") else path.parent / name
        if not file.is_file():
            yield Difference(name, "missing beside the wheel")
            continue
        actual = file.read_bytes()
        if actual != expected:
            what = "the archive's bytes differ" if file == path else "differs"
            yield Difference(
                file.name,
                f"{what} from what is made here",
                _first_difference(actual, expected),
            )


def _notes(
    what: str, recorded: Mapping[str, str], actual: Mapping[str, str]
) -> Iterator[str]:
    for name in sorted({*recorded, *actual}):
        if recorded.get(name) != actual.get(name):
            there = recorded.get(name, "none")[:60]
            here = actual.get(name, "none")[:60]
            yield f"{what}: {name} was {there}, here it is {here}"


def _first_difference(actual: bytes, expected: bytes) -> tuple[str, ...]:
    """The first line in which two contents differ, else their hashes."""
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
    return _hash_lines(sha256_of(expected), sha256_of(actual))


def _hash_lines(expected: str, actual: str) -> tuple[str, ...]:
    """Two hashes that ought to be one, a line each."""
    return (f"expected sha256 {expected}", f"actual sha256   {actual}")
