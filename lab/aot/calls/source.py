# SPDX-License-Identifier: Apache-2.0
"""Extracts the code of a Triton function, whatever its line in the file.

Triton's own cache key contains the line at which a kernel and each helper begins, so
that debug information stays right. Here a moved function must not compile again.
"""

import ast
from functools import cache
from types import ModuleType
from typing import Any

from triton.language import constexpr
from triton.runtime.jit import JITFunction


def parts(function: JITFunction) -> tuple[str, ...]:
    """The code of `function` and of every function it calls, and constants they read.

    Triton's own library is left out, because the compiler's version stands for it.
    Comments and layout do not count.
    """
    texts: dict[str, str] = {}
    _collect(function, texts)
    return tuple(f"{name} {text}" for name, text in sorted(texts.items()))


def _collect(function: JITFunction, texts: dict[str, str]) -> None:
    name = f"{function.fn.__module__}.{function.fn.__qualname__}"
    if name in texts:
        return
    texts[name], names = _syntax(function.src)
    for read, node in names.items():
        value = _value(node, function.fn.__globals__)
        if isinstance(value, JITFunction):
            if not value.fn.__module__.startswith("triton."):
                _collect(value, texts)
        elif isinstance(value, constexpr | bool | int | float | str):
            texts[f"{name} {read}"] = repr(value)


@cache
def _syntax(text: str) -> tuple[str, dict[str, ast.Name | ast.Attribute]]:
    """The code without comments and layout, and the names that it reads."""
    tree = ast.parse(text)
    names = {
        ast.unparse(node): node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return ast.unparse(tree), names


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """What a name or a module's attribute stands for; None for what is local."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        if isinstance(owner, ModuleType):
            return getattr(owner, node.attr, None)
    return None
