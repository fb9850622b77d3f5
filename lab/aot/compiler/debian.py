# SPDX-License-Identifier: Apache-2.0
"""Fetch Intel's offline compiler from Debian's sid, without installing anything.

apt itself resolves, downloads and verifies the packages, from the mirror that this
machine's own apt configuration names. apt's lists, cache and package status are private
ones, so the host's stay as they are.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

SUITE = "sid"
PACKAGES = ("intel-ocloc", "libigc2")


class FetchError(Exception):
    """The packages cannot be fetched; the message says why."""


class Source(NamedTuple):
    """One archive of an apt source: `ring` is the path of its key ring, or None."""

    address: str
    suites: list[str]
    components: list[str]
    ring: str | None


def mirror(apt: Path) -> tuple[str, str | None]:
    """Read the Debian mirror and its key ring from the host's apt configuration.

    Returns:
        (address, path of the key ring or None for apt's default trust).

    Raises:
        FetchError: no source line names a Debian `main` archive.
    """
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    for file in files:
        if not file.is_file() or file.suffix not in (".list", ".sources"):
            continue
        lines = [
            line
            for line in file.read_text(errors="replace").splitlines()
            if not line.lstrip().startswith("#")
        ]
        sources = _deb822(lines) if file.suffix == ".sources" else _one_line(lines)
        for source in sources:
            extra = re.search(r"security|updates|backports", " ".join(source.suites))
            plain = any(re.fullmatch(r"[a-z]+", suite) for suite in source.suites)
            debian = source.address.rstrip("/").endswith("/debian")
            if "main" in source.components and debian and (plain or not extra):
                return source.address, source.ring
    raise FetchError(f"no Debian archive with component main under {apt}")


def _deb822(lines: list[str]) -> Iterator[Source]:
    """The sources of a file of stanzas, each of `Name: value` lines."""
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace() and name:
                fields[name] += " " + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        if "deb" not in fields.get("types", "").split():
            continue
        ring = fields.get("signed-by", "")
        for address in fields.get("uris", "").split():
            yield Source(
                address,
                fields.get("suites", "").split(),
                fields.get("components", "").split(),
                ring if ring.startswith("/") else None,
            )


def _one_line(lines: list[str]) -> Iterator[Source]:
    """The sources of a file with a source on each line."""
    for line in lines:
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+(.*)", line)
        if not match:
            continue
        options, address, suite, components = match.groups()
        ring = re.search(r"signed-by=(/\S+)", options or "")
        yield Source(address, [suite], components.split(), ring[1] if ring else None)


def fetch(cache: Path, apt: Path, progress: Callable[[str], None]) -> Path:
    """Unpack the packages into a new folder of `cache`, which it returns.

    Args:
        apt: the host's apt configuration.
        progress: gets a line before the download.

    Raises:
        FetchError: this is no such host, or apt fails.
    """
    if platform.machine() != "x86_64":
        raise FetchError(f"Debian has ocloc for amd64 only, not {platform.machine()}")
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FetchError(f"{tool} is not here: fetching needs a Debian host")
    address, ring = mirror(apt)
    progress("fetching ocloc and its code generator (about 30 MB) through apt")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as name:
        work = Path(name)
        for folder in ("lists/partial", "cache/archives/partial", "tree"):
            (work / folder).mkdir(parents=True)
        (work / "status").touch()
        signed = f"[signed-by={ring}] " if ring else ""
        (work / "sources.list").write_text(f"deb {signed}{address} {SUITE} main\n")
        options = _apt_options(work)
        _apt(options, "update")
        _apt(options, "--yes", "--download-only", "install", *PACKAGES)
        archives = sorted((work / "cache/archives").glob("*.deb"))
        digest = hashlib.sha256()
        versions = {}
        for archive in archives:
            digest.update(archive.read_bytes())
            package, version = archive.name.split("_")[:2]
            versions[package] = version.replace("%3a", ":")
            subprocess.run(["dpkg-deb", "-x", archive, work / "tree"], check=True)
        missing = [package for package in PACKAGES if package not in versions]
        if missing:
            raise FetchError(f"apt downloaded no {' or '.join(missing)}")
        label = "+".join(f"{versions[p].rpartition('-')[0]}" for p in PACKAGES)
        target = cache / f"{label}-{digest.hexdigest()[:12]}"
        if not (target / "complete").exists():
            (work / "tree/complete").write_text(
                "".join(f"{p} {v}\n" for p, v in sorted(versions.items()))
            )
            shutil.rmtree(target, ignore_errors=True)
            (work / "tree").rename(target)
    return target


def _apt_options(work: Path) -> list[str]:
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "APT::Install-Recommends": "false",
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "_apt",
        "Debug::NoLocking": "true",
    }
    return [f"-o{name}={value}" for name, value in settings.items()]


def _apt(options: list[str], *arguments: str) -> None:
    done = subprocess.run(
        ["apt-get", *options, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise FetchError(f"apt-get {arguments[0]} failed:\n{done.stdout[-1500:]}")
