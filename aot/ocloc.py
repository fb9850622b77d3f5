# SPDX-License-Identifier: Apache-2.0
"""Find Intel's offline compiler, or fetch a recent one into the cache.

Search order: the `OCLOC` variable, an `ocloc` on PATH that is recent enough, a copy
fetched before, and, on Debian hosts of the amd64 architecture, a fresh copy of sid's
`intel-ocloc` and `libigc2`. apt itself resolves, downloads and verifies that copy
through the signed Release chain, from the mirror that this machine's own apt
configuration names; apt's lists, cache and package status are private, so nothing is
installed on the host. The copy brings its own C library and runs through its own
dynamic loader.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SUITE = "sid"
PACKAGES = ("intel-ocloc", "libigc2")
OLDEST = (25, 0)
"""Releases of ocloc before this lack Xe2 and Xe3 devices or spill where it does not."""
LONGEST = 300
"""Seconds that one kernel may take to compile."""


class OclocError(Exception):
    """No usable ocloc; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Ocloc:
    """A compiler that can be run.

    Attributes:
        command: argument list that starts it.
        version: what names this compiler and its code generator in reports and keys.
    """

    command: tuple[str, ...]
    version: str

    def run(self, *arguments: str, cwd: Path) -> str:
        """Run ocloc in `cwd` and return its output; OclocError if it fails."""
        try:
            done = subprocess.run(
                [*self.command, *arguments],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=LONGEST,
            )
        except subprocess.TimeoutExpired as error:
            raise OclocError(
                f"ocloc {' '.join(arguments)} took more than {LONGEST} s"
            ) from error
        if done.returncode:
            raise OclocError(
                f"ocloc {' '.join(arguments)} ended with {done.returncode}:\n"
                f"{done.stdout[-2000:]}"
            )
        return done.stdout


def find(
    cache: Path,
    *,
    environ: Mapping[str, str] | None = None,
    apt: Path = Path("/etc/apt"),
    refresh: bool = False,
    progress: Callable[[str], None] = print,
) -> Ocloc:
    """Return a compiler.

    Args:
        cache: folder for fetched copies, one sub-folder each.
        environ: the process environment unless given.
        apt: the host's apt configuration.
        refresh: fetch again even if a copy is there.
        progress: gets a line before a download.

    Raises:
        OclocError: none is at hand and none can be fetched.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("OCLOC")
    if named:
        found = _probe((named,))
        if found is None:
            raise OclocError(f"OCLOC = {named}: cannot be run; name an ocloc binary")
        return found
    tried = []
    on_path = shutil.which("ocloc", path=environ.get("PATH"))
    if on_path:
        found = _probe((on_path,))
        if found and _number(found.version) >= OLDEST:
            return found
        version = found.version if found else "unknown"
        tried.append(f"{on_path} on PATH is version {version}, too old for Xe2 and Xe3")
    if not refresh:
        for folder in sorted(cache.glob("*/"), key=lambda p: _number(p.name))[::-1]:
            if (folder / "complete").exists():
                return _unpacked(folder)
    try:
        return _unpacked(_fetch(cache, apt, progress))
    except OclocError as error:
        tried.append(str(error))
    raise OclocError(
        "no usable ocloc:\n  "
        + "\n  ".join(tried)
        + "\nSet OCLOC to the binary of Intel's compute runtime, release 25 or later."
    )


def mirror(apt: Path) -> tuple[str, str | None]:
    """Read the Debian mirror and its key ring from the host's apt configuration.

    Returns:
        (address, path of the key ring or None for apt's default trust).

    Raises:
        OclocError: no source line names a Debian `main` archive.
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
        entries = _deb822(lines) if file.suffix == ".sources" else _one_line(lines)
        for address, suites, components, ring in entries:
            archive = not re.search(r"security|updates|backports", " ".join(suites))
            plain = any(re.fullmatch(r"[a-z]+", suite) for suite in suites)
            debian = address.rstrip("/").endswith("/debian")
            if "main" in components and debian and (archive or plain):
                return address, ring
    raise OclocError(f"no Debian archive with component main under {apt}")


def _deb822(lines: list[str]) -> list[tuple[str, list[str], list[str], str | None]]:
    entries = []
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
            entries.append(
                (
                    address,
                    fields.get("suites", "").split(),
                    fields.get("components", "").split(),
                    ring if ring.startswith("/") else None,
                )
            )
    return entries


def _one_line(lines: list[str]) -> list[tuple[str, list[str], list[str], str | None]]:
    entries = []
    for line in lines:
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+(.*)", line)
        if not match:
            continue
        options, address, suite, components = match.groups()
        ring = re.search(r"signed-by=(/\S+)", options or "")
        entries.append(
            (address, [suite], components.split(), ring[1] if ring else None)
        )
    return entries


def _fetch(cache: Path, apt: Path, progress: Callable[[str], None]) -> Path:
    if platform.machine() != "x86_64":
        raise OclocError(f"Debian has ocloc for amd64 only, not {platform.machine()}")
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise OclocError(f"{tool} is not here: fetching needs a Debian host")
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
            raise OclocError(f"apt downloaded no {' or '.join(missing)}")
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
        raise OclocError(f"apt-get {arguments[0]} failed:\n{done.stdout[-1500:]}")


def _unpacked(folder: Path) -> Ocloc:
    binaries = [
        path for path in sorted(folder.glob("usr/bin/ocloc*")) if not path.is_symlink()
    ]
    loaders = sorted(folder.glob("**/ld-linux-x86-64.so.2"))
    if not binaries or not loaders:
        raise OclocError(
            f"{folder} holds no ocloc or no loader; delete it and run again"
        )
    libraries = sorted(
        {str(path.parent) for path in folder.glob("**/x86_64-linux-gnu/*.so*")}
    )
    command = (
        str(loaders[0]),
        "--library-path",
        ":".join(libraries),
        str(binaries[-1]),
    )
    found = _probe(command)
    if found is None:
        raise OclocError(f"{binaries[-1]} does not run; delete {folder} and run again")
    return Ocloc(command, folder.name.rpartition("-")[0])


def _probe(command: tuple[str, ...]) -> Ocloc | None:
    try:
        done = subprocess.run(
            [*command, "query", "OCL_DRIVER_VERSION"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tempfile.gettempdir(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"\d+\.\d+\.\d+(\.\d+)?", done.stdout + done.stderr)
    if done.returncode and version is None:
        return None
    return Ocloc(command, version[0] if version else "unknown")


def _number(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else (0,)
