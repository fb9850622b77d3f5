# SPDX-License-Identifier: Apache-2.0
"""Time of the host in the parts of a layer, by a clock that waits for no device."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

STAND_IN, REST = "stand-ins", "rest of the layer"
Function = Callable[..., Any]


class Spans:
    """Microseconds of each part of a layer; a part within another one counts once.

    Attributes:
        layers: of each call of a layer its name, its tokens, and its parts.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[str, int, dict[str, float]]] = []
        self._parts: Counter[str] = Counter()
        self._inner: list[int] = []
        """What spans within the open ones took, in nanoseconds."""

    def part(self, name: str, function: Function) -> Function:
        """`function`, timed as the part `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            began = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - began
                self._parts[name] += took - self._inner.pop()
                self._parts[f"calls of {name}"] += 1
                if self._inner:
                    self._inner[-1] += took

        return run

    def layer(self, name: str, layer: nn.Module) -> None:
        """Time a layer: what none of its parts takes is its rest."""
        forward = self.part(REST, layer.forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._parts.clear()
            try:
                return forward(*args, **kwargs)
            finally:
                self.layers.append((name, len(args[0]), _in_figures(self._parts)))

        layer.forward = run


def _in_figures(parts: Counter[str]) -> dict[str, float]:
    return {
        name: float(value) if name.startswith("calls") else value / 1e3
        for name, value in parts.items()
    }
