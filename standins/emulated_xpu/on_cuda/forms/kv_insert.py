# SPDX-License-Identifier: Apache-2.0
"""Query norm and RoPE with the key's insert."""

import torch

from standins.emulated_xpu.on_cuda.forms.pages import write_rows
from standins.emulated_xpu.on_cuda.forms.table import device_form
from standins.emulated_xpu.ops.kv_insert import entry_bytes, normalized_and_rotated
from standins.emulated_xpu.pages import all_bytes, entry_places


@device_form("_xpu_C::deepseek_qnorm_rope_kv_insert")
def deepseek_qnorm_rope_kv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
    kv_cache_dtype: str,
) -> None:
    """As the stand-in; it does not check for slots beyond the cache."""
    if kv_cache_dtype != "fp8_ds_mla":
        raise NotImplementedError(f"deepseek_qnorm_rope_kv_insert to {kv_cache_dtype}")
    tokens = len(q)
    slots = slot_mapping[:tokens]
    table = cos_sin_cache[position_ids[:tokens]]
    q.copy_(normalized_and_rotated(q, table, eps))
    data, scales = entry_bytes(kv[:tokens], table)
    valid = slots >= 0
    page, token = slots // block_size, slots % block_size
    start = cache.storage_offset() + page * cache.stride(0)
    places = entry_places(start, token, block_size, data.shape[1], scales.shape[1])
    for part, place in zip((data, scales), places, strict=True):
        write_rows(all_bytes(cache), place, part, valid)
