# SPDX-License-Identifier: Apache-2.0
"""Python source as a syntax tree, in one thread at a time."""

import ast
import threading

_parsing = threading.Lock()


def parse(source: bytes, name: str = "<unknown>") -> ast.Module:
    """The syntax tree of `source`.

    CPython up to 3.11.7 counts the depth of all trees under construction in one place
    (python/cpython#106905): a garbage collection in the midst of one lets another
    thread begin its own, and the first ends with a SystemError.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    with _parsing:
        return ast.parse(source, name)
