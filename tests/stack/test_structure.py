# SPDX-License-Identifier: Apache-2.0
"""The structure of the rooms: how many modules a package has, and how high the tool's
stand."""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("xpustack", "stack", "standins", "proof", "lab", "kernels")
MODULES = 18
"""The most modules of a package, its `__init__` included."""
LEVELS = 12
"""The most modules in a row of which each imports the next. Lower it where you can."""


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {dotted(path): path for room in ROOMS for path in (ROOT / room).rglob("*.py")}


def imported(module: str) -> Iterator[str]:
    """The modules of these that a module imports, anywhere in its code."""
    for node in ast.walk(ast.parse(FILES[module].read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                home = ".".join([*package, home]).rstrip(".")
            inner = [f"{home}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else home for name in inner]
        yield from (name for name in names if name in FILES and name != module)


@cache
def highest(module: str) -> tuple[str, ...]:
    """The longest row of modules of which each imports the next, from this one on."""
    below = [highest(name) for name in imported(module)]
    return (module, *max(below, key=len, default=()))


def test_the_longest_row_of_imports():
    row = max(map(highest, FILES), key=len)
    assert len(row) <= LEVELS, " imports ".join(row)


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in FILES.values()}),
    ids=lambda folder: folder.relative_to(ROOT).as_posix(),
)
def test_a_package_has_few_modules(folder: Path):
    assert len(list(folder.glob("*.py"))) <= MODULES


def test_no_two_test_modules_that_run_together_share_a_name():
    """pytest imports each by its bare name, so the second of a process is not found."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    rooms = [
        ROOT / room for room in project["tool"]["pytest"]["ini_options"]["testpaths"]
    ]
    files = [path for path in rooms if path.is_file()]
    paths = [path for room in rooms for path in room.rglob("test_*.py")] + files
    names = Counter(path.name for path in paths)
    twice = [str(path.relative_to(ROOT)) for path in paths if names[path.name] > 1]
    assert paths and not twice
