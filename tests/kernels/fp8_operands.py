# SPDX-License-Identifier: Apache-2.0
"""Attention's output in FP8: operands to write, and what must be in them."""

import torch
from inputs import exact_table

from kernels.reference import inv_rope as reference
from kernels.xpu_dsv4._output import Fp8Output

POSITIONS = 70
NAN_CODE = 0x7F
BEFORE, AFTER = 2, 1
"""Tokens of others around those that a call writes."""


def poisoned(
    tokens: int, heads: int, per_group: int, device: torch.device
) -> Fp8Output:
    """Operands full of NaN, `BEFORE` and `AFTER` the tokens to write as well.

    Two of the positions are outside the table, and no rotation rounds."""
    groups, total = heads // per_group, BEFORE + tokens + AFTER
    codes = torch.full((groups, total, per_group * 512), NAN_CODE, dtype=torch.uint8)
    positions = torch.randint(0, POSITIONS, (total,))
    positions[BEFORE], positions[BEFORE + tokens // 2] = POSITIONS, -1
    return Fp8Output(
        codes.to(device).view(torch.float8_e4m3fn),
        torch.full((groups, total, per_group * 4), float("nan"), device=device),
        positions.to(device),
        exact_table(POSITIONS, 64, device),
    )


def of_call(operands: Fp8Output) -> Fp8Output:
    """The tokens of `poisoned` that a call writes."""
    return operands[BEFORE : len(operands.positions) - AFTER]


def codes_of(operands: Fp8Output) -> torch.Tensor:
    """The bytes of the values, on the CPU."""
    return operands.values.view(torch.uint8).cpu()


def check_operands(operands: Fp8Output, attention: torch.Tensor) -> None:
    """Insist on what a launch of its own would make of `attention` in bf16, byte by
    byte, and on poison around it."""
    mine = of_call(operands)
    groups, per_group = mine.values.shape[0], mine.heads_per_group
    table, at = mine.cos_sin_cache.cpu(), mine.positions.cpu()
    values, scales = reference.inv_rope_fp8_quant(
        attention.cpu(), at, table, groups, per_group
    )
    want = values.view(torch.uint8).transpose(0, 1)
    assert torch.equal(codes_of(mine), want)
    assert torch.equal(mine.scales.cpu(), scales.transpose(0, 1))
    for others in (operands[:BEFORE], operands[-AFTER:]):
        assert bool((codes_of(others) == NAN_CODE).all())
        assert bool(others.scales.isnan().all())
