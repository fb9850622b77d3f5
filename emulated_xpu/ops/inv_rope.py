# SPDX-License-Identifier: Apache-2.0
"""Inverse RoPE of the attention output, of vllm-xpu-kernels 0.1.11 and later."""

import torch

from emulated_xpu.formats import next_power_of_two
from emulated_xpu.implementations import implements

BLOCK = 128
LARGEST = 448.0


def inverse_rope(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    rope_dim: int,
) -> torch.Tensor:
    """Undo the interleaved RoPE on the last `rope_dim` values of `o`, `[T, H, D]`; the
    result is fp32, grouped as `[T, G, H / G * D]`."""
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
    plain, rope = o.float().split([o.shape[-1] - rope_dim, rope_dim], dim=-1)
    even, odd = rope[..., ::2], rope[..., 1::2]
    pairs = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1)
    return torch.cat((plain, pairs.flatten(-2)), -1).view(len(o), n_groups, -1)


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
    """bf16 rows of shape `[T, G, heads_per_group * head size]`."""
    rows = inverse_rope(attn_output, positions, cos_sin_cache, n_groups, rope_dim)
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
    """e4m3 rows and fp32 scales: per 128 values the least power of two with which they
    fit."""
    rows = inverse_rope(attn_output, positions, cos_sin_cache, n_groups, rope_dim)
    blocks = rows.unflatten(-1, (-1, BLOCK))
    scales = next_power_of_two(blocks.abs().amax(-1).clamp(1e-10) / LARGEST)
    values = (blocks / scales[..., None]).clamp(-LARGEST, LARGEST)
    return values.flatten(-2).to(torch.float8_e4m3fn), scales
