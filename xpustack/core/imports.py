# SPDX-License-Identifier: Apache-2.0
"""Which modules a Python file imports, directly or not."""

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from xpustack.core.files import parse_python


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
