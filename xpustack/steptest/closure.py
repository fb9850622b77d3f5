# SPDX-License-Identifier: Apache-2.0
"""Which files beside a step's test module the test imports, directly or not."""

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from xpustack.core.files import parse_python

CONFTEST = "conftest.py"
"""Has the markers, and pytest reads it without an import."""


def closure(module: Path) -> dict[str, Path]:
    """`module` and the files in its folder that it imports, directly or not, and
    its `CONFTEST`, by name relative to that folder.

    An imported module brings its packages' `__init__.py`, and nothing else of them.
    """
    folder = module.parent
    files: dict[str, Path] = {}
    queue = [module, folder / CONFTEST]
    while queue:
        path = queue.pop()
        name = path.relative_to(folder).as_posix()
        if name in files or not path.is_file():
            continue
        files[name] = path
        package = path.relative_to(folder).parent.parts
        queue += [
            folder.joinpath(*package[:depth], "__init__.py")
            for depth in range(1, len(package) + 1)
        ]
        for imported in _imports(path.read_bytes(), str(path), package):
            place = folder.joinpath(*imported.split("."))
            queue += [place.with_suffix(".py"), place / "__init__.py"]
    return files


@functools.cache
def _imports(source: bytes, name: str, package: tuple[str, ...]) -> tuple[str, ...]:
    """The dotted names that a file of `package` may import as modules. Many step
    tests import the same files, and parsing takes milliseconds."""
    modules: list[str] = []
    for node in ast.walk(parse_python(source, name)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*home, *([node.module] if node.module else [])])
            modules += [base] if base else []
            modules += _below(base, node.names)
    return tuple(modules)


def _below(base: str, names: Iterable[ast.alias]) -> list[str]:
    """What `from base import names` may import if `base` is a package."""
    prefix = f"{base}." if base else ""
    return [prefix + alias.name for alias in names]
