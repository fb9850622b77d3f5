# SPDX-License-Identifier: Apache-2.0
"""Decoding of FP8 KV pages in plain torch, one token at a time, by their definition."""

import torch


def decode_token(cache: torch.Tensor, slot: int) -> torch.Tensor:
    """The 512 values of one slot of an FP8 paged cache.

    Args:
        cache (torch.Tensor):
            Pages of shape `[num_blocks, block_size, 584]`, uint8, with any block
            stride.
        slot (int):
            block * block_size + position in the block.

    Returns:
        Values of shape `[512]`, float64: 448 times e4m3 * 2^(exponent - 127), with one
        exponent per 64 values, then the 64 bf16 values of the rotary part.
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
