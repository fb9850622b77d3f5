# SPDX-License-Identifier: Apache-2.0
"""Random experts in MXFP4 and what their codes stand for."""

import torch

from .indexer_batch import e2m1_values


def weights(
    experts: int, rows: int, columns: int, exponents: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[experts, rows, columns / 2]` packed codes, and a UE8M0 byte for each 32 of
    them, from the first of `exponents` up to below the second."""
    packed = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8)
    shape = (experts, rows, columns // 32)
    return packed, torch.randint(*exponents, shape, dtype=torch.uint8)


def dequantized(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Their values in float64, `[experts, rows, columns]`."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    power = torch.ldexp(torch.ones(()), scales.int() - 127).repeat_interleave(32, -1)
    return e2m1_values(codes) * power
