# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the attention output's inverse RoPE."""

import torch

from .._quant import block_exponent, e4m3_bytes
from .._rope import rotate


def _unrotated(
    o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, groups: int
) -> torch.Tensor:
    """`o` without its RoPE, grouped: `[T, G, D]`, float64."""
    x = rotate(o.double(), positions, cos_sin_cache, inverse=True)
    return x.reshape(o.shape[0], groups, -1)


def inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
    quant_group_size: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.mla.inv_rope.inv_rope_fp8_quant`; tokens are outermost."""
    x = _unrotated(o, positions, cos_sin_cache, n_groups)
    exponent = block_exponent(x, quant_group_size, 448.0, 1e-10)
    codes = e4m3_bytes(x, exponent).view(torch.float8_e4m3fn)
    one = torch.ones_like(exponent, dtype=torch.float32)
    return codes, torch.ldexp(one, exponent - 127)


def inv_rope_bf16(
    attn_output: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.mla.inv_rope.inv_rope_bf16`; float64 result."""
    return _unrotated(attn_output, positions, cos_sin_cache, n_groups)
