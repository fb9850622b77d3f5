# SPDX-License-Identifier: Apache-2.0
"""Find Intel's offline compiler, or fetch a recent one into the cache.

Search order: the `OCLOC` variable, an `ocloc` on PATH that is recent enough, a copy
fetched before, and, on Debian hosts of the amd64 architecture, a fresh copy of sid's
packages. A copy brings its own C library and runs through its own dynamic loader.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.aot.compiler.debian import FetchError, fetch

OLDEST = (25, 0)
"""Older releases of ocloc lack Xe2 and Xe3 devices, or spill more registers."""
LONGEST = 300
"""Seconds that one kernel may take to compile."""


class OclocError(Exception):
    """There is no usable ocloc; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Ocloc:
    """A compiler that can be run.

    Attributes:
        command: argument list that starts it.
        version: the version of the compiler and its code generator, for reports and
            keys.
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
        OclocError: none is installed and none can be fetched.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("OCLOC")
    if named:
        ocloc = _probe((named,))
        if ocloc is None:
            raise OclocError(f"OCLOC = {named}: cannot be run; name an ocloc binary")
        return ocloc
    problems = []
    on_path = shutil.which("ocloc", path=environ.get("PATH"))
    if on_path:
        ocloc = _probe((on_path,))
        if ocloc and _number(ocloc.version) >= OLDEST:
            return ocloc
        version = ocloc.version if ocloc else "unknown"
        problems.append(
            f"{on_path} on PATH is version {version}, too old for Xe2 and Xe3"
        )
    if not refresh:
        for folder in sorted(cache.glob("*/"), key=lambda p: _number(p.name))[::-1]:
            if (folder / "complete").exists():
                return _unpacked(folder)
    try:
        return _unpacked(fetch(cache, apt, progress))
    except (FetchError, OclocError) as error:
        problems.append(str(error))
    raise OclocError(
        "no usable ocloc:\n  "
        + "\n  ".join(problems)
        + "\nSet OCLOC to the binary of Intel's compute runtime, release 25 or later."
    )


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
    if _probe(command) is None:
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
