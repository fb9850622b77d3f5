# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantization of K rows into FP8 KV pages; `_pages` tells how a page is laid out."""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_range,
    check_same_device,
    check_shape,
    fail,
)
from ._launch import launch_options
from ._pages import HEAD_DIM, check_page_cache
from ._pairs import check_pair_rows, pack_bf16, unpack_bf16
from ._triton import tl, triton
from ._ue8m0 import e4m3_code, e4m3_exponent, exponent_inverse


def check_slots(slot_mapping: torch.Tensor, rows: int, num_slots: int) -> None:
    """Raise unless `slot_mapping` is a vector of at most `rows` slots."""
    check_dtype("slot_mapping", slot_mapping, torch.int64, torch.int32)
    check_shape("slot_mapping", slot_mapping, None)
    check_inner_contiguous("slot_mapping", slot_mapping)
    if slot_mapping.shape[0] > rows:
        fail("slot_mapping.shape[0]", slot_mapping.shape[0], f"at most {rows}")
    check_range("slot_mapping", slot_mapping, -1, num_slots)


@triton.jit
def insert_row(
    even,  # [8, 32] fp32
    odd,  # [8, 32] fp32
    cache_ptr,
    slot,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """Quantize one K row, given as pairs in 8 blocks of 64, into its slot's page."""
    block = tl.arange(0, 8)
    pair = tl.arange(0, 32)
    slot = slot.to(tl.int64)
    page = cache_ptr + (slot // BLOCK_SIZE) * block_stride
    token = slot % BLOCK_SIZE
    data = page + token * 576

    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    exponent = e4m3_exponent(tl.maximum(amax, 1e-4))  # [8]
    inverse = exponent_inverse(exponent)[:, None]
    codes = e4m3_code(even * inverse) | (e4m3_code(odd * inverse) << 8)
    words = block[:, None] * 32 + pair[None, :]  # [8, 32]
    low = data.to(tl.pointer_type(tl.int16))
    tl.store(low + words, codes.to(tl.int16), mask=words < 224)
    rope = (data + 448).to(tl.pointer_type(tl.int32))
    tl.store(rope + words - 224, pack_bf16(even, odd), mask=words >= 224)

    scales = page + BLOCK_SIZE * 576 + token * 8
    tl.store(scales + block, tl.where(block < 7, exponent, 0).to(tl.uint8))


@triton.jit
def _insert_k_kernel(
    k_ptr,
    cache_ptr,
    slot_ptr,
    num_slots,
    k_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        words = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
        row = (k_ptr + token * k_stride).to(tl.pointer_type(tl.int32))
        word = tl.load(row + words)  # [8, 32]
        even, odd = unpack_bf16(word)
        insert_row(even, odd, cache_ptr, slot, block_stride, BLOCK_SIZE)


def quantize_and_insert_k_cache(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int = 64,
    is_ue8m0: bool = True,
) -> None:
    """Quantize K rows to e4m3 with UE8M0 scales and write them into their pages.

    Block b of 64 values is stored as `x / 2^e`, rounded to nearest even, with
    `e = ceil(log2(max(amax_b, 1e-4) / 448))`; the last 64 values stay bf16.

    Args:
        k: rows of shape `[N, 512]`, bf16, in rope order (448 values, then 64).
        k_cache: pages of shape `[num_blocks, page bytes]` or
            `[num_blocks, block_size, 584]`, uint8. The block stride may be padded.
        slot_mapping: slots of shape `[T]`, T <= N, int64 or int32. A slot below 0 or
            beyond the cache writes nothing.
        block_size: tokens a page.
        is_ue8m0: must be true; the cache has no other scale format.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    if not is_ue8m0:
        fail("is_ue8m0", is_ue8m0, "True")
    check_shape("k", k, None, HEAD_DIM)
    check_pair_rows("k", k)
    check_page_cache("k_cache", k_cache, block_size)
    check_same_device(k=k, k_cache=k_cache, slot_mapping=slot_mapping)
    num_slots = k_cache.shape[0] * block_size
    check_slots(slot_mapping, k.shape[0], num_slots)

    if slot_mapping.shape[0]:
        _insert_k_kernel[(slot_mapping.shape[0],)](
            k,
            k_cache,
            slot_mapping,
            num_slots,
            k.stride(0),
            k_cache.stride(0),
            BLOCK_SIZE=block_size,
            **launch_options(k.device, num_warps=1),
        )
