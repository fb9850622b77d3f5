# SPDX-License-Identifier: Apache-2.0
"""Which kernels a package launches, read from its source."""

import ast
from collections.abc import Iterator
from pathlib import Path


def launched(folder: Path) -> dict[str, Path]:
    """Name → file of every Triton kernel under `folder` that no other kernel calls.

    A function that another kernel calls is compiled as a part of it; every other one
    exists to be launched.
    """
    kernels: dict[str, Path] = {}
    called: set[str] = set()
    for file in sorted(folder.glob("**/*.py")):
        for function in _jitted(ast.parse(file.read_text())):
            kernels[function.name] = file
            called.update(_calls(function))
    return {name: file for name, file in kernels.items() if name not in called}


def _jitted(module: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(decorator).partition("(")[0] == "triton.jit"
            for decorator in node.decorator_list
        ):
            yield node


def _calls(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
