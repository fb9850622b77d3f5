# SPDX-License-Identifier: Apache-2.0
"""The compressor of the main cache: softmax over a block of tokens, norm, RoPE, and
the entry's bytes."""

import torch

from standins.emulated_xpu.wheel.implementations import implements

HEAD, QUANT_BLOCK = 512, 64
FP8_MAX = 448.0


def _compressed(
    state_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    ratio: int,
    window: int,
) -> torch.Tensor:
    """`[E, 512]` means of the last `window` tokens up to each of `positions`, weighted
    by their scores channel by channel, summed in the order of the tokens.

    Args:
        block_table: `[E, B]`, the row of each entry's request.
    """
    block_size, width = state_cache.shape[1], state_cache.shape[2] // 2
    shape = (len(positions), HEAD)
    largest = torch.full(shape, -1e30)
    total, weighted = torch.zeros(shape), torch.zeros(shape)
    for index in range(window):
        at = positions - window + 1 + index
        place = at.clamp(min=0)
        block = block_table.gather(1, (place // block_size)[:, None])[:, 0]
        state = state_cache[block.long(), place % block_size]
        first = HEAD if index >= ratio else 0
        kv = state[:, first : first + HEAD]
        score = state[:, width + first : width + first + HEAD]
        new = torch.maximum(largest, score)
        kept, p = torch.exp(largest - new), torch.exp(score - new)
        inside = (at >= 0)[:, None]
        total = torch.where(inside, total * kept + p, total)
        weighted = torch.where(inside, weighted * kept + p * kv, weighted)
        largest = torch.where(inside, new, largest)
    return torch.where(total > 0, weighted / total, 0.0)


@implements("_xpu_C::fused_kv_compress_norm_rope_insert_sparse_attn")
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
    """Write the entry of each token that ends a block of `compress_ratio` tokens.

    Raises:
        ValueError: a ratio or a page stride that the op refuses.
        IndexError: there are more positions than slots; a device would read foreign
            memory.
    """
    if (compress_ratio, overlap) not in ((4, 1), (128, 0)):
        raise ValueError(f"ratio {compress_ratio} with overlap {overlap}")
    if kv_block_stride != k_cache.stride(0):
        raise ValueError(f"pages of {k_cache.stride(0)} bytes, not {kv_block_stride}")
    for given in (slot_mapping, kv_slot_mapping, token_to_req_indices):
        if len(given) < len(positions):
            raise IndexError(f"{len(positions)} positions, {len(given)} slots or rows")
    tokens = len(positions)
    slots = kv_slot_mapping[:tokens]
    ends = (slot_mapping[:tokens] >= 0) & (positions >= 0) & (slots >= 0)
    ends &= (positions + 1) % compress_ratio == 0
    at, slots = positions[ends], slots[ends]
    if not len(at):
        return
    rows = block_table[token_to_req_indices[:tokens][ends].long()]
    window = (1 + overlap) * compress_ratio
    x = _compressed(state_cache, rows, at, compress_ratio, window)
    data, scales = entry_bytes(
        x,
        rms_norm_weight,
        rms_norm_eps,
        cos_sin_cache[at + 1 - compress_ratio],
        rope_head_dim,
        scale_dim,
    )
    page_bytes = kv_cache_block_size * (token_stride + scale_dim)
    pages = k_cache.as_strided((len(k_cache), page_bytes), (kv_block_stride, 1))
    page, row = (slots // kv_cache_block_size)[:, None], slots % kv_cache_block_size
    first = (row * token_stride)[:, None]
    pages[page, first + torch.arange(data.shape[1])] = data
    first = (kv_cache_block_size * token_stride + row * scale_dim)[:, None]
    pages[page, first + torch.arange(scale_dim)] = scales


def entry_bytes(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    turn: torch.Tensor,
    rope_head_dim: int,
    scale_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data `[E, 576]` and scales `[E, scale_dim]` of the entries that the means `x`,
    `[E, 512]`, give after norm and RoPE; `turn` has each entry's row of the table."""
    mean = x.square().sum(-1, keepdim=True) / HEAD
    x = x * torch.rsqrt(mean + eps) * weight.float()

    nope, half = HEAD - rope_head_dim, rope_head_dim // 2
    cos, sin = turn.float().split(half, dim=1)
    even, odd = x[:, nope::2], x[:, nope + 1 :: 2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    rope = pairs.flatten(1).bfloat16()

    blocks = x[:, :nope].bfloat16().float().unflatten(1, (-1, QUANT_BLOCK))
    amax = blocks.abs().amax(-1).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(amax * torch.tensor(1 / FP8_MAX)))
    scaled = blocks * torch.exp2(-exponent)[..., None]
    codes = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    exponents = (exponent + 127).clamp(0, 255).to(torch.uint8)
    scales = torch.nn.functional.pad(exponents, (0, scale_dim - exponents.shape[1]))
    data = torch.cat((codes.flatten(1).view(torch.uint8), rope.view(torch.uint8)), 1)
    return data, scales
