# SPDX-License-Identifier: Apache-2.0
"""Inverse RoPE of the attention output, of vllm-xpu-kernels 0.1.11 and later.

Shapes, layouts and roundings are those of `csrc/xpu/sycl/deepseek_inv_rope_*.cpp`,
whose files are the same from 0.1.11 to 0.1.13.1. So are the arguments that they refuse.
"""

import torch

from standins.emulated_xpu.wheel.formats import (
    e4m3_codes_without_subnormals,
    next_power_of_two,
    quotient,
)
from standins.emulated_xpu.wheel.implementations import implements

BLOCK = 128
LARGEST = 448.0


def inverse_rope(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
) -> torch.Tensor:
    """Undo the interleaved RoPE on the last `rope_dim` values of `o`, `[T, H, D]`; the
    result is fp32, grouped as `[T, G, H / G * D]`.

    Raises:
        ValueError: the kernels refuse such arguments.
    """
    if not o.is_contiguous():
        raise ValueError("deepseek_inv_rope: o must be contiguous")
    if positions.dtype != torch.int64 or cos_sin_cache.dtype != torch.float32:
        raise ValueError("deepseek_inv_rope: int64 positions and an fp32 table")
    sizes = (n_groups * heads_per_group, nope_dim + rope_dim)
    if o.shape[1:] != sizes or positions.shape != o.shape[:1]:
        raise ValueError(f"deepseek_inv_rope: o is {tuple(o.shape)}, not {sizes}")
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    plain, rope = o.float().split([nope_dim, rope_dim], dim=-1)
    even, odd = rope[..., ::2], rope[..., 1::2]
    pairs = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1)
    rows = torch.cat((plain, pairs.flatten(-2)), -1)
    return rows.view(len(o), n_groups, heads_per_group * (nope_dim + rope_dim))


@implements("_xpu_C::deepseek_inv_rope_bf16")
def deepseek_inv_rope_bf16(
    attn_output: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
) -> torch.Tensor:
    """bf16 rows of shape `[T, G, heads_per_group * head size]`, tokens outermost."""
    sizes = (n_groups, heads_per_group, nope_dim, rope_dim)
    rows = inverse_rope(attn_output, positions, cos_sin_cache, *sizes)
    return rows.to(torch.bfloat16)


@implements("_xpu_C::deepseek_inv_rope_fp8_quant")
def deepseek_inv_rope_fp8_quant(
    attn_output: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 rows `[G, T, D]` and fp32 scales `[G, T, D / 128]`, both contiguous: per 128
    values the least power of two with which they fit."""
    sizes = (n_groups, heads_per_group, nope_dim, rope_dim)
    rows = inverse_rope(attn_output, positions, cos_sin_cache, *sizes)
    blocks = rows.transpose(0, 1).unflatten(-1, (-1, BLOCK)).contiguous()
    scales = next_power_of_two(quotient(blocks.abs().amax(-1).clamp(1e-10), LARGEST))
    codes = e4m3_codes_without_subnormals(blocks, scales[..., None])
    return codes.flatten(-2).view(torch.float8_e4m3fn), scales
