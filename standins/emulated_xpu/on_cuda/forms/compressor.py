# SPDX-License-Identifier: Apache-2.0
"""The compressor of the main cache, for as many entries as the tokens can complete."""

import torch

from standins.emulated_xpu.on_cuda.forms.pages import write_rows
from standins.emulated_xpu.on_cuda.forms.table import device_form
from standins.emulated_xpu.ops.compressor import HEAD, entry_bytes
from standins.emulated_xpu.pages import all_bytes, entry_places


def means(
    state_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    ratio: int,
    window: int,
) -> torch.Tensor:
    """As the stand-in's, with all tokens of a window at once."""
    block_size, width = state_cache.shape[1], state_cache.shape[2] // 2
    index = torch.arange(window, device=positions.device)
    at = positions[:, None] - window + 1 + index
    place = at.clamp(min=0)
    column = (place // block_size).clamp(max=block_table.shape[1] - 1)
    block = block_table.gather(1, column).long().clamp(min=0)
    first = torch.where(index >= ratio, HEAD, 0)[:, None]
    channel = first + torch.arange(HEAD, device=positions.device)
    row, place = block[..., None], (place % block_size)[..., None]
    score = state_cache[row, place, width + channel]
    inside = (at >= 0)[..., None]
    p = score.where(inside, -torch.inf).softmax(1)
    p = p.where(inside, 0.0)
    return (p * state_cache[row, place, channel].where(inside, 0.0)).sum(1)


@device_form("_xpu_C::fused_kv_compress_norm_rope_insert_sparse_attn")
def fused_kv_compress_norm_rope_insert_sparse_attn(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
    overlap: int,
    rope_head_dim: int,
    token_stride: int,
    scale_dim: int,
    kv_block_stride: int,
) -> None:
    """As the stand-in, off by rounding: a mean is not summed token by token."""
    tokens = len(positions)
    if not tokens:
        return
    slots = kv_slot_mapping[:tokens]
    ends = (slot_mapping[:tokens] >= 0) & (positions >= 0) & (slots >= 0)
    ends &= (positions + 1) % compress_ratio == 0
    # Consecutive positions of a request end a block once in `compress_ratio`.
    most = min(tokens, tokens // compress_ratio + len(block_table))
    chosen = (~ends).int().argsort(stable=True)[:most]
    valid, at, slots = ends[chosen], positions[chosen].clamp(min=0), slots[chosen]
    request = (
        token_to_req_indices[:tokens][chosen].long().clamp(0, len(block_table) - 1)
    )
    window = (1 + overlap) * compress_ratio
    x = means(state_cache, block_table[request], at, compress_ratio, window)
    block = (at + 1 - compress_ratio).clamp(min=0)
    data, scales = entry_bytes(
        x,
        rms_norm_weight,
        rms_norm_eps,
        cos_sin_cache[block],
        rope_head_dim,
        scale_dim,
    )
    slots = slots.clamp(min=0)
    page, row = slots // kv_cache_block_size, slots % kv_cache_block_size
    start = k_cache.storage_offset() + page * kv_block_stride
    places = entry_places(start, row, kv_cache_block_size, token_stride, scale_dim)
    for part, place in zip((data, scales), places, strict=True):
        write_rows(all_bytes(k_cache), place, part, valid)
