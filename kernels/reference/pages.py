# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV page layout in plain torch: one token at a time, by its definition."""

import torch


def decode_token(cache: torch.Tensor, slot: int) -> torch.Tensor:
    """The 512 values of one slot of an FP8 paged cache.

    Args:
        cache: `[num_blocks, block_size, 584]` uint8 with any block stride.
        slot: block * block_size + position in the block.

    Returns:
        float64 of shape `[512]`: 448 values e4m3 * 2^(exponent - 127), one exponent a
        64, and the 64 bf16 values as they are.
    """
    block_size = cache.shape[1]
    page = cache[slot // block_size].reshape(-1)
    position = slot % block_size
    data = page[position * 576 : (position + 1) * 576]
    start = block_size * 576 + position * 8
    exponents = page[start : start + 7].to(torch.float64)
    nope = data[:448].clone().view(torch.float8_e4m3fn).to(torch.float64)
    scale = torch.exp2(exponents - 127).repeat_interleave(64)
    rope = data[448:].clone().view(torch.bfloat16).to(torch.float64)
    return torch.cat([nope * scale, rope])
