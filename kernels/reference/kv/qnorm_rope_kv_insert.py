# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of query norm + RoPE and KV RoPE + insert."""

import torch

from .._rope import rotate
from .kv_quant import insert_rows


def xpu_qnorm_rope_kv_fp8_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
    norm_q: bool = True,
) -> None:
    """See `kernels.xpu_dsv4.kv.qnorm_rope_kv_insert.xpu_qnorm_rope_kv_fp8_insert`."""
    x = q.double()
    if norm_q:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    q.copy_(rotate(x, positions, cos_sin_cache))
    rows = rotate(kv.double(), positions, cos_sin_cache)
    tokens = slot_mapping.shape[0]
    insert_rows(rows[:tokens], swa_kv_cache, slot_mapping, block_size)
