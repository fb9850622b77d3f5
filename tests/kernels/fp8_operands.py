# SPDX-License-Identifier: Apache-2.0
"""Attention's output in FP8: operands to write, and what must be in them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from inputs import exact_table, rotary_table

from kernels.reference.mla import inv_rope as reference
from kernels.xpu_dsv4.mla._output import Fp8Output

POSITIONS = 70
NAN_CODE = 0x7F
BEFORE, AFTER = 2, 1
"""Tokens of others around those that a call writes."""
MOST_APART = 1e-3
"""Of the codes: a GPU may round a rotation once where the reference rounds twice."""


def poisoned(
    tokens: int,
    heads: int,
    per_group: int,
    device: torch.device,
    table: Callable[[int, int, torch.device], torch.Tensor] = exact_table,
) -> Fp8Output:
    """Operands full of NaN, `BEFORE` and `AFTER` the tokens to write as well.

    Two of the positions are outside the table; no rotation of `exact_table` rounds."""
    groups, total = heads // per_group, BEFORE + tokens + AFTER
    codes = torch.full((groups, total, per_group * 512), NAN_CODE, dtype=torch.uint8)
    positions = torch.randint(0, POSITIONS, (total,))
    positions[BEFORE], positions[BEFORE + tokens // 2] = POSITIONS, -1
    return Fp8Output(
        codes.to(device).view(torch.float8_e4m3fn),
        torch.full((groups, total, per_group * 4), float("nan"), device=device),
        positions.to(device),
        table(POSITIONS, 64, device),
    )


def rotating(operands: Fp8Output) -> Fp8Output:
    """`operands` with int32 positions and a table of plain RoPE in bf16, whose rows lie
    apart."""
    table = rotary_table(POSITIONS, 64, operands.positions.device).bfloat16()
    return replace(
        operands,
        positions=operands.positions.int(),
        cos_sin_cache=torch.cat((table, table), 1)[:, :64],
    )


def of_call(operands: Fp8Output) -> Fp8Output:
    """The tokens of `poisoned` that a call writes."""
    return operands[BEFORE : len(operands.positions) - AFTER]


def codes_of(operands: Fp8Output) -> torch.Tensor:
    """The bytes of the values, on the CPU."""
    return operands.values.view(torch.uint8).cpu()


def code_steps(codes: torch.Tensor) -> torch.Tensor:
    """Where e4m3 codes lie in the order of their values: neighbours are 1 apart."""
    magnitudes = (codes & 0x7F).int()
    return torch.where(codes >= 0x80, -magnitudes, magnitudes)


def check_operands(
    operands: Fp8Output, attention: torch.Tensor, exactly: bool = True
) -> None:
    """Insist on what a launch of its own would make of `attention` in bf16, byte by
    byte, and on poison around it. Without `exactly`, for rotations that round, few
    codes may be their neighbours."""
    mine = of_call(operands)
    groups, per_group = mine.values.shape[0], mine.heads_per_group
    table, at = mine.cos_sin_cache.cpu(), mine.positions.cpu()
    values, scales = reference.inv_rope_fp8_quant(
        attention.cpu(), at, table, groups, per_group
    )
    want = values.view(torch.uint8).transpose(0, 1)
    apart = (code_steps(codes_of(mine)) - code_steps(want)).abs()
    assert int(apart.max()) <= (0 if exactly else 1)
    assert float((apart > 0).double().mean()) <= (0 if exactly else MOST_APART)
    assert torch.equal(mine.scales.cpu(), scales.transpose(0, 1))
    for others in (operands[:BEFORE], operands[-AFTER:]):
        assert bool((codes_of(others) == NAN_CODE).all())
        assert bool(others.scales.isnan().all())
