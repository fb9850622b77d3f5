# SPDX-License-Identifier: Apache-2.0
"""Which form computes which op on the device."""

from collections.abc import Callable

from torch.profiler import record_function

import standins.emulated_xpu.ops  # noqa: F401  (its modules register the stand-ins)
from standins.emulated_xpu.wheel.implementations import IMPLEMENTATIONS, Implementation

FORMS: dict[str, Implementation] = {}
"""Device forms by the qualified name of their op."""
LABEL = "stand-in "
"""How a profile names what a stand-in launched: this and the op."""


def device_form(name: str) -> Callable[[Implementation], Implementation]:
    """Register the form of the op `name` ("namespace::op").

    Raises:
        LookupError: no stand-in has that name.
    """
    if name not in IMPLEMENTATIONS:
        raise LookupError(f"{name} has no stand-in that a device form could replace")

    def register(function: Implementation) -> Implementation:
        FORMS[name] = function
        return function

    return register


def replace_stand_ins() -> None:
    """Let the forms compute their ops, and label every stand-in in profiles. Call it
    before the ops are defined."""
    for name, function in {**IMPLEMENTATIONS, **FORMS}.items():
        IMPLEMENTATIONS[name] = _labelled(name, function)


def _labelled(name: str, function: Implementation) -> Implementation:
    def run(*args: object, **kwargs: object) -> object:
        with record_function(LABEL + name):
            return function(*args, **kwargs)

    return run
