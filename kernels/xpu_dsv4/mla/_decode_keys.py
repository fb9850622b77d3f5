# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the keys of a decoded token are: its slots, in two caches, and their bytes."""

from .._fp8 import token_pointers
from .._triton import tl, triton


@triton.jit
def load_slots(
    topk_row_ptr,
    swa_row_ptr,
    key_offs,  # [BLOCK_N]
    topk_len,
    last_key,
    num_kv_slots,
    num_swa_slots,
    HAS_TOPK: tl.constexpr,
):
    """int32 slots `[BLOCK_N]` of a token's keys: the top-k's first, then the window's.

    -1 stands for a key from `last_key` on and for an index outside its cache.
    """
    if HAS_TOPK:
        topk_mask = key_offs < topk_len  # [BLOCK_N]
        row_ptrs = tl.where(
            topk_mask, topk_row_ptr, swa_row_ptr - topk_len
        )  # [BLOCK_N]
        num_slots = tl.where(topk_mask, num_kv_slots, num_swa_slots)  # [BLOCK_N]
    else:
        row_ptrs = swa_row_ptr
        num_slots = num_swa_slots
    # [BLOCK_N]
    indices = tl.load(row_ptrs + key_offs, mask=key_offs < last_key, other=-1)
    in_cache_mask = (indices >= 0) & (indices < num_slots)  # [BLOCK_N]
    return tl.where(in_cache_mask, indices, -1).to(tl.int32)


@triton.jit
def key_pointers(
    slots,  # [BLOCK_N]
    key_offs,  # [BLOCK_N]
    topk_len,
    kv_ptr,
    swa_ptr,
    kv_block_stride,
    swa_block_stride,
    KV_BLOCK_SIZE: tl.constexpr,
    SWA_BLOCK_SIZE: tl.constexpr,
    HAS_TOPK: tl.constexpr,
):
    """Pointers to the data bytes and to the exponent bytes of keys, `[BLOCK_N]` each.

    A slot of -1 points to slot 0.
    """
    # Unsigned numbers are divided by a power of two in one instruction.
    read_slots = tl.maximum(slots, 0).to(tl.uint32)  # [BLOCK_N]
    # [BLOCK_N] each
    data_ptrs, scale_ptrs = token_pointers(
        swa_ptr, read_slots, swa_block_stride, SWA_BLOCK_SIZE
    )
    if HAS_TOPK:
        topk_mask = key_offs < topk_len  # [BLOCK_N]
        # [BLOCK_N] each
        topk_data_ptrs, topk_scale_ptrs = token_pointers(
            kv_ptr, read_slots, kv_block_stride, KV_BLOCK_SIZE
        )
        data_ptrs = tl.where(topk_mask, topk_data_ptrs, data_ptrs)
        scale_ptrs = tl.where(topk_mask, topk_scale_ptrs, scale_ptrs)
    return data_ptrs, scale_ptrs
