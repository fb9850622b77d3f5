# SPDX-License-Identifier: Apache-2.0
"""Which function computes which op: the modules of `emulated_xpu.ops` say so here."""

from collections.abc import Callable
from typing import Any

Implementation = Callable[..., Any]

IMPLEMENTATIONS: dict[str, Implementation] = {}
"""By the op's qualified name, "namespace::op"."""


def implements(name: str) -> Callable[[Implementation], Implementation]:
    """Give the op `name` ("namespace::op") its computation in torch.

    The function takes the arguments of the schema. Where pins differ in a schema
    the later arguments have defaults.

    Raises:
        ValueError: the op has one already.
    """

    def register(function: Implementation) -> Implementation:
        if name in IMPLEMENTATIONS:
            raise ValueError(f"{name} is implemented twice")
        IMPLEMENTATIONS[name] = function
        return function

    return register
