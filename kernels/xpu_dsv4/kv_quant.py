# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantization of K rows into the paged FP8 cache.

A page of `block_size` tokens holds first 576 bytes a token (448 e4m3 values, then 64
bf16 rope values), after all of them 8 bytes a token (7 UE8M0 exponents, one per 64
values, and a zero), then padding up to the block stride.
"""

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
from ._pairs import check_pair_rows, pack_bf16, unpack_bf16
from ._triton import tl, triton
from ._ue8m0 import e4m3_code, e4m3_exponent, exponent_inverse

HEAD_DIM = 512
TOKEN_BYTES = 576
SCALE_BYTES = 8


def page_bytes(block_size: int) -> int:
    """Bytes that `block_size` tokens occupy in a page, without padding."""
    return block_size * (TOKEN_BYTES + SCALE_BYTES)


def check_page_cache(name: str, cache: torch.Tensor, block_size: int) -> None:
    """Raise unless `cache` holds uint8 pages of `block_size` tokens.

    Pages are `[num_blocks, page bytes]` or `[num_blocks, block_size, 584]`; the block
    stride may exceed the page, and must keep 4-byte words aligned.
    """
    check_dtype(name, cache, torch.uint8)
    if block_size < 1:
        fail("block_size", block_size, "at least 1")
    if cache.dim() not in (2, 3):
        fail(f"{name}.shape", list(cache.shape), "[blocks, bytes] or [blocks, *, 584]")
    check_inner_contiguous(name, cache)
    if cache.dim() == 3 and cache.shape[1] > 1 and cache.stride(1) != cache.shape[2]:
        fail(f"{name}.stride()", cache.stride(), "pages without gaps inside")
    inner = cache[0].numel() if cache.shape[0] else page_bytes(block_size)
    if inner < page_bytes(block_size):
        fail(f"{name}.shape", list(cache.shape), f"{page_bytes(block_size)} B a block")
    if cache.stride(0) % 4 and cache.shape[0] > 1:
        fail(f"{name}.stride(0)", cache.stride(0), "a multiple of 4")
    if cache.storage_offset() % 4:
        fail(f"{name}.storage_offset()", cache.storage_offset(), "a multiple of 4")


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
