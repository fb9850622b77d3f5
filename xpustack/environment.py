# SPDX-License-Identifier: Apache-2.0
"""What a result depends on beside the tree: programs, packages, files."""

import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from xpustack.errors import EnvironmentProblem

_IGNORED = frozenset({"__pycache__"})


@cache
def lock() -> str:
    """Digest of the interpreter and every installed distribution's version."""
    packages = sorted(
        {
            f"{(dist.metadata['Name'] or '').lower()}=={dist.version}"
            for dist in metadata.distributions()
        }
    )
    return digest(
        interpreter=sys.version, machine=platform.platform(), packages=packages
    )


@cache
def tool(*modules: str) -> str:
    """Digest of the named modules of xpustack: the recipe behind a result."""
    here = Path(__file__).parent
    return digest(
        **{name: (here / f"{name}.py").read_text("utf-8") for name in modules}
    )


def digest(**parts: str | Iterable[str]) -> str:
    """One sha256 over named parts; order within a sequence counts."""
    total = hashlib.sha256()
    for name in sorted(parts):
        part = parts[name]
        values = [part] if isinstance(part, str) else list(part)
        for text in (name, str(len(values)), *values):
            data = text.encode()
            total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()


def files_digest(files: Mapping[str, Path]) -> str:
    """Digest of files' contents under the names that they are to have."""
    return digest(
        **{
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in files.items()
        }
    )


def folder_files(folder: Path) -> dict[str, Path]:
    """A folder's regular files by their path relative to its parent; no caches."""
    return {
        path.relative_to(folder.parent).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _IGNORED & set(path.parts)
    }


def version_of(distribution: str) -> str | None:
    """The installed version, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def require(distribution: str, version: str, because: str) -> None:
    """Insist on one version of an installed tool.

    Raises:
        EnvironmentProblem: another version, or none, is installed.
    """
    installed = version_of(distribution)
    if installed != version:
        raise EnvironmentProblem(
            f"{distribution}=={version} is needed, "
            + (f"{installed} is installed" if installed else "none is installed"),
            detail=[because],
            hint="tox -e apply-and-test",
        )
