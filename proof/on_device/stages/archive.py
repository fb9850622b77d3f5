# SPDX-License-Identifier: Apache-2.0
"""One archive to send: reports, tables and logs, without names of host or user."""

import getpass
import gzip
import io
import re
import socket
import tarfile
from collections.abc import Mapping
from pathlib import Path

from proof.on_device.stages.records import Report, parse_report
from proof.on_device.stages.setup import Setup
from stack.core.cache import atomic_file
from stack.core.errors import UsageError

NAME = "device-report.tar.gz"
REPORT = "report.json"
_REPORTS = f"ls .device/*/report/{NAME}: what xpustack device wrote"
_COMMON = frozenset({"root", "localhost", "user", "ubuntu", "vllm", "intel", "admin"})
"""Names that identify nobody."""
_TEXTS = {
    "doctor": ("log.txt",),
    "prove": ("log.txt", "machine_code.json"),
    "compare": ("log.txt", "benchmark.json"),
    "tune": ("log.txt", "tried.json"),
    "serve": ("log.txt",),
}


def names(setup: Setup) -> dict[str, str]:
    """The words to remove from an archive, each with its replacement."""
    host = socket.gethostname()
    found = {
        str(setup.out): "<out>",
        str(setup.project.root): "<checkout>",
        str(Path.home()): "<home>",
        host: "<host>",
        host.partition(".")[0]: "<host>",
        _user(): "<user>",
    }
    return {
        name: stand_in
        for name, stand_in in found.items()
        if len(name) > 1 and name not in _COMMON and name != "/root"
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def anonymous(text: str, hidden: Mapping[str, str]) -> str:
    """`text` with each hidden name replaced, the longest first."""
    for name in sorted(hidden, key=len, reverse=True):
        pattern = rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])"
        text = re.sub(pattern, hidden[name], text)
    return text


def write(setup: Setup) -> Path:
    """Write the archive of everything.

    The folder's own report is made anonymous as well.
    """
    hidden = names(setup)
    folder = setup.folder("report")
    texts = {
        REPORT: (folder / REPORT).read_text("utf-8"),
        "report.md": (folder / "report.md").read_text("utf-8"),
    }
    for stage, files in _TEXTS.items():
        for file in files:
            path = setup.out / stage / file
            if path.is_file():
                texts[f"{stage}/{file}"] = path.read_text("utf-8", "replace")
    for path in sorted((setup.out / "tuned").glob("*.json")):
        texts[f"tuned/{path.name}"] = path.read_text("utf-8")
    clean = {name: anonymous(text, hidden) for name, text in texts.items()}
    for name in (REPORT, "report.md"):
        with atomic_file(folder / name) as output:
            output.write(clean[name].encode())
    target = folder / NAME
    with (
        atomic_file(target) as output,
        gzip.GzipFile(filename="", mode="wb", fileobj=output, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, text in sorted(clean.items()):
            data = text.encode()
            member = tarfile.TarInfo(f"device-report/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return target


def read(path: Path) -> Report:
    """The report in an archive, or a `report.json`.

    Raises:
        UsageError: there is no such file, or no report in it.
    """
    if not path.is_file():
        raise UsageError("there is no such report", path=path, hint=_REPORTS)
    if path.suffix == ".json":
        return parse_report(path.read_bytes(), str(path))
    try:
        with tarfile.open(path) as archive:
            member = archive.extractfile(f"device-report/{REPORT}")
            content = member.read() if member else b""
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise UsageError(
            f"not an archive of a device report: {error}", path=path, hint=_REPORTS
        ) from None
    return parse_report(content, str(path))
