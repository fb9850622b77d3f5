# SPDX-License-Identifier: Apache-2.0
"""What vLLM's XPU path rounds, as functions from float32 to float32."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
CACHE_GROUP = 64
LINEAR_GROUP = 128
MX_GROUP = 32
NOPE = 448


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest of four bits; of two the one with an even code."""
    exponent = torch.frexp(x).exponent.clamp(min=1)
    step = torch.exp2(exponent.float() - 2)
    return ((x / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)


def power_of_two(amax: torch.Tensor, largest: float = E4M3_MAX) -> torch.Tensor:
    """The least power of two p with amax <= largest p."""
    mantissa, exponent = torch.frexp(amax / largest)
    return torch.exp2(exponent.float() - (mantissa == 0.5).float())


def grouped(x: torch.Tensor, size: int, floor: float, ue8m0: bool) -> torch.Tensor:
    """FP8 with one scale for `size` values along the last dimension."""
    groups = x.unflatten(-1, (-1, size))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=floor)
    scale = power_of_two(amax) if ue8m0 else amax / E4M3_MAX
    return (e4m3(groups / scale) * scale).flatten(-2)


def activation(x: torch.Tensor) -> torch.Tensor:
    """What an FP8 linear layer makes of its input: 128 values share an fp32 scale."""
    return grouped(x, LINEAR_GROUP, 1e-10, ue8m0=False)


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """What an MXFP8 linear layer makes of its input: 32 values share a power of two."""
    return grouped(x, MX_GROUP, 1e-10, ue8m0=True)


def attention_output(x: torch.Tensor) -> torch.Tensor:
    """What the grouped output projection takes: 128 values share a power of two."""
    return grouped(x, LINEAR_GROUP, 1e-10, ue8m0=True)


def cache_entry(x: torch.Tensor) -> torch.Tensor:
    """A row of a KV page: 448 values in e4m3 by groups of 64, 64 in bf16."""
    rounded = bf16(x)
    values = grouped(rounded[..., :NOPE], CACHE_GROUP, 1e-4, ue8m0=True)
    return torch.cat((values, rounded[..., NOPE:]), -1)


def index_vector(x: torch.Tensor) -> torch.Tensor:
    """An indexer's key or one head of its query: e4m3 with one power of two."""
    return grouped(bf16(x), x.shape[-1], 1e-4, ue8m0=True)


def e2m1_towards_zero(x: torch.Tensor) -> torch.Tensor:
    """The nearest of four bits; of two the smaller one."""
    exponent = torch.frexp(x).exponent.clamp(min=1)
    step = torch.exp2(exponent.float() - 2)
    nearest = (x.abs() / step - 0.5).ceil() * step
    return nearest.clamp(max=E2M1_MAX).copysign(x)


def mxfp4(x: torch.Tensor, nearest: Rounding = e2m1) -> torch.Tensor:
    """e2m1 of which 32 share a power of two."""
    groups = x.unflatten(-1, (-1, MX_GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126)
    scale = power_of_two(amax, E2M1_MAX)
    return (nearest(groups / scale) * scale).flatten(-2)


def e4m3_away(x: torch.Tensor) -> torch.Tensor:
    """e4m3 as the pin's op makes it of an indexer's query: of two the larger one; below
    2^-6 cut to a multiple of 2^-9 after that."""
    exponent = torch.frexp(x).exponent
    step = torch.exp2(exponent.float() - 4)
    nearest = (x.abs() / step + 0.5).floor() * step
    cut = (nearest * 2.0**9).floor() * 2.0**-9
    return torch.minimum(nearest, cut).clamp(max=E4M3_MAX).copysign(x)


def index_query(x: torch.Tensor) -> torch.Tensor:
    """One head of an indexer's query in FP8, as the pin's op rounds it."""
    x = bf16(x)
    amax = x.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = power_of_two(amax)
    return e4m3_away(x / scale) * scale


def mxfp4_key(x: torch.Tensor) -> torch.Tensor:
    """An indexer's key in MXFP4."""
    return mxfp4(bf16(x))


def mxfp4_query(x: torch.Tensor) -> torch.Tensor:
    """One head of an indexer's query in MXFP4, as the pin's op rounds it."""
    return mxfp4(bf16(x), e2m1_towards_zero)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Forms:
    """What is rounded, and how: nothing, unless it is said."""

    kept: Rounding = same
    """What an operator gives."""
    linear: Rounding = same
    """The input of a quantized linear layer."""
    output: Rounding = same
    """The input of the grouped output projection."""
    window: Rounding = same
    """A token's key, which is its value as well."""
    entry: Rounding = same
    """The same of a compressed entry."""
    index_key: Rounding = same
    index_query: Rounding = same
    """Each head of the indexer's queries."""

    @classmethod
    def of_xpu(cls, activations: bool, output_fp8: bool, index_fp4: bool) -> "Forms":
        """Those of vLLM's XPU path: whether linear layers and the output projection
        take FP8, and whether the indexer's vectors are in MXFP4."""
        return cls(
            kept=bf16,
            linear=mxfp8 if activations else bf16,
            output=mxfp8 if output_fp8 else bf16,
            window=cache_entry,
            entry=cache_entry,
            index_key=mxfp4_key if index_fp4 else index_vector,
            index_query=mxfp4_query if index_fp4 else index_query,
        )
