# SPDX-License-Identifier: Apache-2.0
"""Decoding of FP8 KV pages in plain torch, by their definition."""

import torch


def decode_tokens(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The 512 values of each slot of an FP8 paged cache.

    Args:
        cache (torch.Tensor):
            Pages of shape `[num_blocks, block_size, 584]`, uint8, with any block
            stride.
        slots (torch.Tensor):
            block * block_size + position in the block, of shape `[N]`, all valid.

    Returns:
        Values of shape `[N, 512]`, float64: 448 times e4m3 * 2^(exponent - 127), with
        one exponent per 64 values, then the 64 bf16 values of the rotary part.
    """
    block_size = cache.shape[1]
    blocks, places = (slots // block_size).unique(return_inverse=True)
    pages = cache[blocks].flatten(1)
    data, scales = pages.split((block_size * 576, block_size * 8), dim=1)
    positions = slots % block_size
    rows = data.reshape(-1, block_size, 576)[places, positions]
    exponents = scales.reshape(-1, block_size, 8)[places, positions, :7]
    nope = rows[:, :448].contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    scale = torch.exp2(exponents.to(torch.float64) - 127).repeat_interleave(64, 1)
    rope = rows[:, 448:].contiguous().view(torch.bfloat16).to(torch.float64)
    return torch.cat([nope * scale, rope], 1)


def decode_token(cache: torch.Tensor, slot: int) -> torch.Tensor:
    """The 512 values of one slot, float64."""
    return decode_tokens(cache, torch.tensor([slot], device=cache.device))[0]
