# SPDX-License-Identifier: Apache-2.0
"""Digests of what a result depends on: programs, packages, code, files."""

import ast
import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from stack.core.files import closure, parse_python

_IGNORED = frozenset({"__pycache__"})
_PACKAGE = Path(__file__).parents[1]
UNCOVERED = frozenset(
    {
        # These affect a result only through the tree's id, which is in every key.
        "base.archive",
        "base.releases",
        "base.store",
        "core.project",
        "series.tree",
        # These report and decide nothing.
        "core.errors",
        "core.progress",
    }
)
"""Modules whose code no key covers, although the modules of a recipe import them."""


@cache
def lock() -> str:
    """Digest of the interpreter, the C library and every installed distribution's
    version. The machine's kernel is left out: it affects no result."""
    # Each look at `metadata` reads and parses its file.
    described = [dist.metadata for dist in metadata.distributions()]
    packages = sorted(
        {f"{(about['Name'] or '').lower()}=={about['Version']}" for about in described}
    )
    return digest(
        interpreter=sys.version,
        machine=[sys.platform, platform.machine(), *platform.libc_ver()],
        packages=packages,
    )


@cache
def tool(*modules: str) -> str:
    """Digest of the code behind a result: the named modules of xpustack and all
    modules of xpustack that they import, directly or indirectly, except those in
    `UNCOVERED`.

    Comments, docstrings and layout do not count.
    """
    return digest(**{name: _code(path) for name, path in module_closure(modules)})


def module_closure(
    modules: Iterable[str], without: Iterable[str] = UNCOVERED
) -> list[tuple[str, Path]]:
    """The named modules and all that they import, by dotted name within xpustack,
    sorted; `without` some."""
    left_out = set(map(_file, without))

    def foreign(path: Path) -> bool:
        return path in left_out or not path.is_relative_to(_PACKAGE)

    files = closure(map(_file, modules), _PACKAGE.parent, foreign).values()
    names = (file.relative_to(_PACKAGE).with_suffix("").parts for file in files)
    return sorted(zip(map(".".join, names), files, strict=True))


def _file(name: str) -> Path:
    return _PACKAGE.joinpath(*name.split(".")).with_suffix(".py")


def _code(path: Path) -> str:
    """A module's code without its comments, docstrings and layout."""
    module = parse_python(path.read_bytes(), str(path))
    for node in ast.walk(module):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            node.body = [*node.body[1:], ast.Pass()]
    return ast.dump(module)


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
    """Digest of the files' contents and the names that they are given here."""
    return digest(**file_digests(files))


def file_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """The sha256 of each file's content, by name."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
    }


def folder_files(folder: Path) -> dict[str, Path]:
    """A folder's regular files by their path relative to its parent, without caches."""
    return {
        path.relative_to(folder.parent).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _IGNORED & set(path.parts)
    }


@cache
def installed_version(distribution: str) -> str | None:
    """The installed version, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
