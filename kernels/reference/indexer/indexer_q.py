# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the indexer's query preparation."""

import torch

from .._quant import block_exponent, e2m1_nibbles, e4m3_bytes
from .._rope import rotate


def fused_indexer_q_rope_quant(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    use_fp4: bool = False,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """See `xpu_dsv4.indexer.indexer_q.fused_indexer_q_rope_quant`; float64 weights."""
    turned = rotate(index_q.double(), positions, index_q_cos_sin_cache)
    x = turned.to(torch.bfloat16).double()
    weights = index_weights.double() * index_weights_softmax_scale
    weights = weights * index_weights_head_scale
    if use_fp4:
        exponent = block_exponent(x, 32, 6.0, 6.0 * 2.0**-126)
        nibbles = e2m1_nibbles(x, exponent)
        packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
        scales = exponent.to(torch.uint8).contiguous().view(torch.int32)
        return (packed, scales.squeeze(-1)), weights
    exponent = block_exponent(x, x.shape[-1], 448.0, 1e-4)
    codes = e4m3_bytes(x, exponent).view(torch.float8_e4m3fn)
    return codes, torch.ldexp(weights, exponent.squeeze(-1) - 127)
