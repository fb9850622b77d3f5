# SPDX-License-Identifier: Apache-2.0
"""A layer of Flash's experts with random MXFP4 weights, and what a step gives it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

LIMIT = 10.0


@dataclass(frozen=True)
class Sizes:
    """Of a layer."""

    experts: int = 256
    topk: int = 6
    hidden: int = 4096
    intermediate: int = 2048

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert: three products, codes and exponents."""
        return 3 * self.hidden * self.intermediate * 17 // 32


@dataclass(frozen=True)
class Layer:
    """Experts as in a checkpoint; parts as `routed_experts` names them."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


@dataclass(frozen=True)
class Step:
    """What a step gives the experts."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


Experts = Callable[[Step], torch.Tensor]
"""An implementation with its own form of a layer's weights."""


@cache
def layer_of(sizes: Sizes, device: torch.device) -> Layer:
    """Random experts."""

    def part(rows: int, width: int, low: int, high: int) -> torch.Tensor:
        shape = (sizes.experts, rows, width)
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device)

    columns, hidden = sizes.intermediate, sizes.hidden
    return Layer(
        part(2 * columns, hidden // 2, 0, 256),
        part(2 * columns, hidden // 32, 118, 124),
        part(hidden, columns // 2, 0, 256),
        part(hidden, columns // 32, 118, 124),
    )


def step_of(sizes: Sizes, tokens: int, device: torch.device) -> Step:
    """Tokens that choose at random, each `topk` experts."""
    x = torch.randn(tokens, sizes.hidden, device=device).bfloat16()
    weights = torch.rand(tokens, sizes.topk, device=device)
    chosen = torch.rand(tokens, sizes.experts, device=device).argsort(1)
    return Step(x, weights, chosen[:, : sizes.topk].int().contiguous())
