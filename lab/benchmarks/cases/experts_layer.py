# SPDX-License-Identifier: Apache-2.0
"""A layer of Flash's experts with random weights, and what a step gives it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from kernels.xpu_dsv4.moe._experts_formats import FP8, INT4, MXFP4, Format

LIMIT = 10.0


@dataclass(frozen=True)
class Sizes:
    """Of a layer."""

    experts: int = 256
    topk: int = 6
    hidden: int = 4096
    intermediate: int = 2048
    form: Format = MXFP4

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert: three products, codes and scales."""
        values = 3 * self.hidden * self.intermediate
        block = self.form.columns * self.form.values
        scale: int = self.form.scales.itemsize
        return self.form.width(values) + values // block * scale


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

    def part(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = sizes.experts
        options = {"device": device}
        if sizes.form is FP8:
            codes = torch.randint(0, 127, (count, rows, width), **options)
            sign = torch.randint(0, 2, (count, rows, width), **options) << 7
            blocks = torch.rand(count, -(-rows // 128), -(-width // 128), **options)
            stored = (codes | sign).byte().view(torch.float8_e4m3fn)
            return stored, 1e-4 * (1 + blocks)
        codes = torch.randint(
            256, (count, rows, width // 2), dtype=torch.uint8, **options
        )
        if sizes.form is INT4:
            groups = torch.rand(count, rows, -(-width // 128), **options)
            return codes, (0.01 * (1 + groups)).bfloat16()
        shape = (count, rows, width // 32)
        return codes, torch.randint(118, 124, shape, dtype=torch.uint8, **options)

    columns, hidden = sizes.intermediate, sizes.hidden
    return Layer(*part(2 * columns, hidden), *part(hidden, columns))


def step_of(sizes: Sizes, tokens: int, device: torch.device) -> Step:
    """Tokens that choose at random, each `topk` experts."""
    x = torch.randn(tokens, sizes.hidden, device=device).bfloat16()
    weights = torch.rand(tokens, sizes.topk, device=device)
    chosen = torch.rand(tokens, sizes.experts, device=device).argsort(1)
    return Step(x, weights, chosen[:, : sizes.topk].int().contiguous())
