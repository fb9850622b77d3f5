# SPDX-License-Identifier: Apache-2.0
"""Which function computes which op. The modules of `ops` register here."""

from collections.abc import Callable
from typing import Any

Implementation = Callable[..., Any]

IMPLEMENTATIONS: dict[str, Implementation] = {}
"""Functions by the qualified name of their op, "namespace::op"."""


def implements(name: str) -> Callable[[Implementation], Implementation]:
    """Register the function that computes the op `name` ("namespace::op").

    The function takes the arguments of the schema. Arguments that only later pins have
    need defaults.

    Raises:
        ValueError: the op has a function already.
    """

    def register(function: Implementation) -> Implementation:
        if name in IMPLEMENTATIONS:
            raise ValueError(f"{name} is implemented twice")
        IMPLEMENTATIONS[name] = function
        return function

    return register
