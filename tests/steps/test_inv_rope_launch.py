# SPDX-License-Identifier: Apache-2.0
"""The shared inverse RoPE also launches on devices without PDL."""

import torch
from helpers import layout
from helpers import reference_ops as reference
from helpers.common_ops import HEAD, normal, on_device, table


def test_it_launches() -> None:
    o = normal(3, 4, HEAD).to(torch.bfloat16)
    positions = torch.tensor([7, 0, 3])
    codes, scales = layout.common_op("fused_inv_rope_fp8_quant")(
        *on_device(o, positions, table(8)), 2, 2, tma_aligned_scales=False
    )
    rows = reference.rotate(o, table(8)[positions][:, None], sign=-1)
    made = codes.cpu().double().view(3, 2, -1, 128) * scales.cpu().double()[..., None]
    error = (made - rows.view(3, 2, -1, 128)).abs().max() / rows.abs().max()
    assert error < 2**-4, f"the rotated output is off by {error:.2g}"
