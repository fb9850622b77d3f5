# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the insert into FP8 pages."""

import torch

from .._quant import block_exponent, e4m3_bytes


def insert_rows(
    rows: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Quantize float64 rows of shape `[N, 512]` and write them into their slots."""
    nope, rope = rows.split((448, 64), dim=-1)
    exponent = block_exponent(nope, 64, 448.0, 1e-4)
    codes = e4m3_bytes(nope, exponent)
    rope_bytes = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    pages = cache if cache.dim() == 2 else cache.flatten(1)
    for i, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < cache.shape[0] * block_size:
            continue
        page, token = pages[slot // block_size], slot % block_size
        page[token * 576 : token * 576 + 448] = codes[i]
        page[token * 576 + 448 : token * 576 + 576] = rope_bytes[i]
        scales = block_size * 576 + token * 8
        page[scales : scales + 7] = exponent[i].to(torch.uint8)
        page[scales + 7] = 0
