# SPDX-License-Identifier: Apache-2.0
"""Reads and links files, says what Python ones import, and which folders may be
written.

Of the stack's own files only plain ones are read. Symbolic links are not followed: a
build would depend on files outside the repository, which no commit records.
"""

import ast
import functools
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from stack.core.errors import (
    EnvironmentProblem,
    SeriesError,
    StackError,
    UsageError,
)

_parsing = threading.Lock()


def link_in(path: Path, root: Path) -> Path | None:
    """The first symbolic link on the path from the directory `root` down to `path`;
    None if there is none. `root` itself may be a link."""
    # Strings: a check asks this some 17,000 times, and joining paths takes longer.
    place = str(root)
    for part in path.relative_to(root).parts:
        place = f"{place}/{part}"
        if os.path.islink(place):
            return Path(place)
    return None


def linked(link: Path, kind: type[StackError] = SeriesError) -> StackError:
    """The error about a symbolic link; it names the command that replaces the link by
    a copy of its target."""
    place, target = shlex.quote(str(link)), shlex.quote(os.path.realpath(link))
    copied = f" && cp -rL {target} {place}" if link.exists() else ""
    return kind(
        "this is a symbolic link, and links are not followed",
        path=link,
        hint=f"rm {place}{copied}",
    )


def read_file(path: Path, root: Path, kind: type[StackError] = SeriesError) -> bytes:
    """The bytes of a plain file below `root`.

    Raises:
        FileNotFoundError: there is none; the caller knows what that means.
        kind: the file, or a folder above it, is a link or is of the wrong kind.
        EnvironmentProblem: the system refuses to read it.
    """
    if link := link_in(path, root):
        raise linked(link, kind)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except (IsADirectoryError, NotADirectoryError):
        folder = path.is_dir()
        raise kind(
            "a folder is where a file must be"
            if folder
            else "a file is where a folder must be",
            path=path if folder else file_above(path),
            hint="move it away, then: "
            f"git -C {shlex.quote(str(root))} checkout -- {path.relative_to(root)}",
        ) from None
    except OSError as error:
        raise EnvironmentProblem(
            f"the file cannot be read: {error.strerror or error}",
            path=path,
            hint=f"ls -ld {shlex.quote(str(path))}",
        ) from error


def file_above(path: Path) -> Path:
    """The file that prevents `path` from being a directory, or lying in one."""
    candidates = (path, *path.parents)
    return next((candidate for candidate in candidates if candidate.is_file()), path)


def links_below(folder: Path) -> list[Path]:
    """Every symbolic link in a folder, itself included, sorted."""
    below = (folder, *sorted(folder.rglob("*")))
    return [path for path in below if path.is_symlink()]


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Create a hard link where the file system has them, else a copy."""
    try:
        os.link(source, target)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:
        # Another file system, no hard links, or too many of this file.
        shutil.copy2(source, target)


def vacant(directory: Path) -> bool:
    """Whether a command may write there: the folder is absent or empty."""
    if not directory.exists():
        return True
    return directory.is_dir() and not any(directory.iterdir())


def not_ours(directory: Path, release: str, command: str) -> UsageError:
    """The error about a folder with files that `xpustack COMMAND` did not make."""
    return UsageError(
        f"the directory is not empty and was not made by xpustack {command}",
        release=release,
        path=directory,
        hint="choose a new directory",
    )


def parse_python(source: bytes, name: str = "<unknown>") -> ast.Module:
    """The syntax tree of `source`.

    CPython up to 3.11.7 keeps one depth counter for all trees under construction
    (python/cpython#106905). If a garbage collection lets another thread begin to parse
    in the middle of a parse, the first parse fails with a SystemError.

    Raises:
        SyntaxError, ValueError: the source is not Python.
    """
    with _parsing:
        return ast.parse(source, name)


def closure(
    modules: Iterable[Path],
    folder: Path,
    without: Callable[[Path], bool] = lambda path: False,
) -> dict[str, Path]:
    """`modules` and the files below `folder` that they import, directly or not, by
    name relative to it. Left out are those that do not exist, and what `without`
    says.

    An imported module brings its packages' `__init__.py`, and nothing else of them.
    """
    files: dict[str, Path] = {}
    queue = list(modules)
    while queue:
        path = queue.pop()
        name = path.relative_to(folder).as_posix()
        if name in files or without(path) or not path.is_file():
            continue
        files[name] = path
        package = path.relative_to(folder).parent.parts
        queue += [
            folder.joinpath(*package[:depth], "__init__.py")
            for depth in range(1, len(package) + 1)
        ]
        for imported in imports(path.read_bytes(), str(path), package):
            place = folder.joinpath(*imported.split("."))
            queue += [place.with_suffix(".py"), place / "__init__.py"]
    return files


@functools.cache
def imports(source: bytes, name: str, package: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The dotted names that a file of `package` may import as modules. Many files are
    asked about more than once, and parsing takes milliseconds."""
    modules: list[str] = []
    for node in ast.walk(parse_python(source, name)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*home, *([node.module] if node.module else [])])
            modules += [base] if base else []
            prefix = f"{base}." if base else ""
            modules += [prefix + alias.name for alias in node.names]
    return tuple(modules)
