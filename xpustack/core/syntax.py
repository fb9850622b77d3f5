# SPDX-License-Identifier: Apache-2.0
"""Parses Python source, in one thread at a time."""

import ast
import threading

_parsing = threading.Lock()


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
