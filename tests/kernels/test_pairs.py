# SPDX-License-Identifier: Apache-2.0
"""Rounding to bf16 by bits equals the cast."""

import torch

from kernels.xpu_dsv4._pairs import round_to_bf16
from kernels.xpu_dsv4._triton import tl, triton


@triton.jit
def _round(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(out_ptr + offs, round_to_bf16(tl.load(x_ptr + offs)))


def test_every_kind_of_number_rounds_as_the_cast_does(device: torch.device) -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 14,)).int()
    # Ties, both ways, and their neighbours; zeros, infinities, NaN.
    ties = torch.arange(0x3F80_7FFE, 0x3F82_8002, 1 << 14).int()
    special = [0, -(2**31), 0x7F80_0000, -0x80_0000, 0x7FC0_0000, 0x7FFF_FFFF, 1]
    special += [0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 0x7F7F_FFFF]
    values = torch.cat((bits, ties, torch.tensor(special, dtype=torch.int32)))
    size = 1 << 15
    x = torch.zeros(size)
    x[: len(values)] = values.view(torch.float32)
    x = x.to(device)
    out = torch.empty_like(x)
    _round[(1,)](x, out, BLOCK=size)
    want = x.bfloat16().float()
    assert torch.equal(out.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(out[known].view(torch.int32), want[known].view(torch.int32))
