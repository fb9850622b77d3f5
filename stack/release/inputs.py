# SPDX-License-Identifier: Apache-2.0
"""What a wheel was made of: files of the base and of this repository by hash, programs
of this machine by version."""

import os
import platform
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.base.releases import Release
from stack.builds import wheel
from stack.core import fingerprint
from stack.core.errors import EnvironmentProblem
from stack.core.process import Runner, clean_environment
from stack.core.project import Project
from stack.release.resource import Resource, sha256_of
from stack.release.runtime import Runtime
from stack.series.order import ORDER
from stack.series.overlay import TRITON, NewFiles
from stack.series.patch import format_patch
from stack.series.tree import KERNEL_HOME, Step, Tree

PROGRAMS = (
    "cmake",
    "jinja2",
    "ninja",
    "packaging",
    "setuptools",
    "setuptools-rust",
    "setuptools-scm",
    "torch",
    "wheel",
)
"""The distributions that take part in a build."""


@dataclass(frozen=True)
class WheelBuild:
    """A wheel and what it was made of.

    Attributes:
        data: the wheel's canonical archive.
        tool: the sha256 of each module of the tool that takes part.
        machine: the version of each program that does.
    """

    release: Release
    version: str
    name: str
    data: bytes
    wheel: wheel.Wheel
    tip: Tree
    steps: tuple[Step, ...]
    parts: tuple[Resource, ...]
    runtime: Runtime
    tool: Mapping[str, str]
    machine: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The wheel's sha256."""
        return sha256_of(self.data)


def _input(name: str, sha256: str, **annotations: str) -> Resource:
    return Resource(name, digest={"sha256": sha256}, annotations=annotations)


def inputs(project: Project, release: Release, steps: Sequence[Step]) -> list[Resource]:
    """The base, the order of the series, and per step the patch and the new files.

    Raises:
        SeriesError: an overlay file or a kernel is missing or malformed.
    """
    order = project.series_dir(release.name) / ORDER
    files = [
        _input(release.sdist, release.sha256, kind="base"),
        _input(_relative(project, order), sha256_of(order.read_bytes()), kind="series"),
    ]
    new_files = NewFiles(project)
    for step in steps:
        patch = sha256_of(format_patch(step))
        name = _relative(project, step.path)
        files.append(_input(name, patch, kind="patch", step=step.slug))
        for path, file in sorted(new_files.of(step).items()):
            kind, name = "overlay", _relative(project, file.source)
            if path == f"{KERNEL_HOME}/{TRITON}.py":
                kind, name = "generated", path
            elif path.startswith(KERNEL_HOME + "/"):
                kind = "kernel"
            sha256 = sha256_of(file.content)
            files.append(_input(name, sha256, kind=kind, step=step.slug, lands=path))
    return files


def tool() -> dict[str, str]:
    """The sha256 of each module and template of this tool that takes part in a
    build."""
    files = {
        f"{name.replace('.', '/')}.py": path
        for name, path in fingerprint.module_closure(["release.ship"], without=())
    }
    templates = Path(__file__).parent.glob("*.jinja")
    files |= {f"release/{path.name}": path for path in sorted(templates)}
    return {
        f"stack/{name}": sha256_of(path.read_bytes()) for name, path in files.items()
    }


def machine(runner: Runner) -> dict[str, str]:
    """The programs of this machine that can change a wheel's bytes, by version."""
    libc = " ".join(platform.libc_ver()).strip()
    versions = {
        "python": f"{sys.implementation.name} {platform.python_version()}",
        "machine": f"{sys.platform} {platform.machine()}",
        "libc": libc or "unknown",
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "compiler": _compiler(runner),
    }
    for name in PROGRAMS:
        versions[name] = fingerprint.installed_version(name) or "not installed"
    return versions


def _compiler(runner: Runner) -> str:
    """The first line of the C++ compiler's `--version`, or `none`: bases without an
    extension need no compiler. `$CXX` may hold arguments; no shell reads it."""
    try:
        command = [*shlex.split(os.environ.get("CXX", "c++")), "--version"]
        done = runner.run(command, cwd=Path("/"), env=clean_environment(), timeout=60.0)
    except (EnvironmentProblem, OSError, ValueError):
        return "none"
    lines = done.stdout.splitlines()
    return lines[0] if done.returncode == 0 and lines else "none"


def _relative(project: Project, path: Path) -> str:
    return path.relative_to(project.root).as_posix()
