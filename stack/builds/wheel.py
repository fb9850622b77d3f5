# SPDX-License-Identifier: Apache-2.0
"""Reads untrusted wheels, and writes wheels in one canonical form.

Two builds of one tree may differ only in the order, the times and the modes of the
archive's members. The canonical form fixes these.

The library `installer` is not used: it sorts a RECORD's metadata first and reads
`a\\b` as `a/b`.
"""

import base64
import csv
import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import RawMetadata, parse_email

from stack.base.archive import EXECUTABLE, PLAIN, path_problem
from stack.core.errors import CheckFailed

TIME = (1980, 1, 1, 0, 0, 0)
"""The first moment that a zip archive can hold."""
MAX_SIZE = 1 << 30
_UNIX = 3
_LEVEL = 6
_READ_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
)
"""What zipfile raises for a damaged member."""


@dataclass(frozen=True)
class Member:
    """One file in a wheel: its content, and whether it may be executed."""

    data: bytes
    executable: bool = False

    @property
    def digest(self) -> str:
        """The sha256 as RECORD writes it."""
        text = base64.urlsafe_b64encode(hashlib.sha256(self.data).digest())
        return "sha256=" + text.rstrip(b"=").decode()


@dataclass(frozen=True)
class Wheel:
    """The readable part of a wheel.

    `members` are in the archive's order; `problems` has one sentence per unreadable
    member, by its name ("" for the archive itself).
    """

    members: Mapping[str, Member]
    problems: Mapping[str, str]

    @property
    def metadata(self) -> RawMetadata:
        """What `*.dist-info/METADATA` says, without fields that are there twice; empty
        where the wheel has no such file."""
        for name, member in self.members.items():
            if name.endswith(".dist-info/METADATA") and name.count("/") == 1:
                return parse_email(member.data)[0]
        return {}


def read(path: Path | io.BytesIO) -> Wheel:
    """Read every member, each on its own, so that one damaged member does not
    hide the others. Nothing is written to disk."""
    members: dict[str, Member] = {}
    problems: dict[str, str] = {}
    remaining = MAX_SIZE
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename
                remaining -= info.file_size
                problem = path_problem(name)
                if name in members:
                    problem = "the archive has it twice"
                elif remaining < 0:
                    problem = f"the archive unpacks to more than {MAX_SIZE} bytes"
                if problem is None:
                    try:
                        mode = info.external_attr >> 16
                        members[name] = Member(archive.read(info), bool(mode & 0o100))
                    except _READ_ERRORS as error:
                        problem = f"damaged: {error}"
                if problem is not None:
                    problems[name] = problem
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        problems[""] = f"the wheel is damaged or cut short: {error}"
    return Wheel(members, problems)


def record_problems(wheel: Wheel) -> dict[str, str]:
    """The mismatches between the wheel's RECORD and its members, by member."""
    names = [name for name in wheel.members if name.endswith(".dist-info/RECORD")]
    if len(names) != 1:
        return {"": f"it has {len(names)} RECORD files"}
    own = names[0]
    listed = {}
    text = wheel.members[own].data.decode("utf-8", "replace")
    for row in csv.reader(io.StringIO(text, newline="")):
        if row:
            listed[row[0]] = row[1:2] or [""]
    problems = {
        name: "RECORD does not list it"
        for name in wheel.members
        if name not in listed and name != own
    }
    for name, [value] in listed.items():
        if name == own:
            continue
        if name not in wheel.members:
            problems[name] = "RECORD lists it and the archive lacks it"
        elif value != wheel.members[name].digest:
            problems[name] = "its content is not what RECORD says"
    return problems


def canonical(wheel: Wheel) -> bytes:
    """The one archive of these members: sorted, metadata last, and at the end RECORD,
    written anew; one time, two modes.

    Raises:
        CheckFailed: the wheel could not be read to its end.
    """
    if wheel.problems:
        raise CheckFailed(
            "the build yields a wheel that cannot be read",
            detail=[f"{name}: {problem}" for name, problem in wheel.problems.items()],
        )
    own = next(name for name in wheel.members if name.endswith(".dist-info/RECORD"))
    home = own.removesuffix("RECORD")
    others = sorted(
        wheel.members.keys() - {own}, key=lambda name: (name.startswith(home), name)
    )
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    for name in others:
        member = wheel.members[name]
        writer.writerow([name, member.digest, len(member.data)])
    writer.writerow([own, "", ""])
    members = {name: wheel.members[name] for name in others}
    members[own] = Member(record.getvalue().encode())
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, member in members.items():
            info = zipfile.ZipInfo(name, TIME)
            info.create_system = _UNIX
            info.compress_type = zipfile.ZIP_DEFLATED
            mode = EXECUTABLE if member.executable else PLAIN
            info.external_attr = mode << 16
            archive.writestr(info, member.data, compresslevel=_LEVEL)
    return target.getvalue()


def leaks(wheel: Wheel, places: Iterable[str]) -> list[str]:
    """The members that contain one of the given paths, one line per member and path."""
    return [
        f"{name} names {place}"
        for place in places
        for name, member in wheel.members.items()
        if place.encode() in member.data
    ]
