# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantization of K rows into FP8 KV pages; `_pages` describes the layout of a page."""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from ._launch import launch_options
from ._pages import (
    HEAD_DIM,
    NOPE_DIM,
    QUANT_BLOCK,
    SCALE_BYTES,
    TOKEN_BYTES,
    check_page_cache,
)
from ._pairs import check_pair_rows, pack_bf16, unpack_bf16
from ._triton import tl, triton
from ._ue8m0 import e4m3_code, e4m3_exponent, exponent_inverse

MIN_AMAX = 1e-4
"""Least absolute maximum assumed of a block; it bounds the exponents from below."""


def check_slots(slot_mapping: torch.Tensor, rows: int) -> None:
    """Raise unless `slot_mapping` is a vector of at most `rows` slots."""
    check_dtype("slot_mapping", slot_mapping, torch.int64, torch.int32)
    check_shape("slot_mapping", slot_mapping, None)
    check_inner_contiguous("slot_mapping", slot_mapping)
    if slot_mapping.shape[0] > rows:
        fail("slot_mapping.shape[0]", slot_mapping.shape[0], f"at most {rows}")


@triton.jit
def row_words(
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    QUANT_BLOCK: tl.constexpr = QUANT_BLOCK,
):
    """Offsets of a K row's 32-bit words, `[8, 32]`: the words of a block in a row."""
    BLOCKS: tl.constexpr = HEAD_DIM // QUANT_BLOCK
    PAIRS: tl.constexpr = QUANT_BLOCK // 2
    return tl.arange(0, BLOCKS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]


@triton.jit
def insert_row(
    even,  # [8, 32] fp32
    odd,  # [8, 32] fp32
    cache_ptr,
    slot,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    NOPE_DIM: tl.constexpr = NOPE_DIM,
    QUANT_BLOCK: tl.constexpr = QUANT_BLOCK,
    TOKEN_BYTES: tl.constexpr = TOKEN_BYTES,
    SCALE_BYTES: tl.constexpr = SCALE_BYTES,
    MIN_AMAX: tl.constexpr = MIN_AMAX,
):
    """Quantize one K row, given as pairs in 8 blocks of 64, into the page of `slot`."""
    NOPE_WORDS: tl.constexpr = NOPE_DIM // 2
    NOPE_BLOCKS: tl.constexpr = NOPE_DIM // QUANT_BLOCK
    PAIRS: tl.constexpr = QUANT_BLOCK // 2
    block_offs = tl.arange(0, HEAD_DIM // QUANT_BLOCK)  # [8]
    pair_offs = tl.arange(0, PAIRS)  # [32]
    page_ptr = cache_ptr + (slot // BLOCK_SIZE) * block_stride
    token = slot % BLOCK_SIZE
    data_ptr = page_ptr + token * TOKEN_BYTES

    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)  # [8]
    exponents = e4m3_exponent(tl.maximum(amax, MIN_AMAX))  # [8]
    inverses = exponent_inverse(exponents)[:, None]  # [8, 1]
    codes = e4m3_code(even * inverses) | (e4m3_code(odd * inverses) << 8)  # [8, 32]
    word_offs = block_offs[:, None] * PAIRS + pair_offs[None, :]  # [8, 32]
    codes_ptr = data_ptr.to(tl.pointer_type(tl.int16))
    tl.store(codes_ptr + word_offs, codes.to(tl.int16), mask=word_offs < NOPE_WORDS)
    rope_ptr = (data_ptr + NOPE_DIM).to(tl.pointer_type(tl.int32))
    tl.store(
        rope_ptr + word_offs - NOPE_WORDS,
        pack_bf16(even, odd),
        mask=word_offs >= NOPE_WORDS,
    )

    scales_ptr = page_ptr + BLOCK_SIZE * TOKEN_BYTES + token * SCALE_BYTES
    tl.store(
        scales_ptr + block_offs,
        tl.where(block_offs < NOPE_BLOCKS, exponents, 0).to(tl.uint8),
    )


@triton.jit
def _insert_k_kernel(
    k_ptr,
    cache_ptr,
    slots_ptr,
    num_slots,
    k_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        word_offs = row_words()  # [8, 32]
        row_ptr = (k_ptr + token * k_stride).to(tl.pointer_type(tl.int32))
        words = tl.load(row_ptr + word_offs)  # [8, 32]
        even, odd = unpack_bf16(words)  # [8, 32] each
        insert_row(even, odd, cache_ptr, slot, block_stride, BLOCK_SIZE)


def quantize_and_insert_k_cache(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int = 64,
    is_ue8m0: bool = True,
) -> None:
    """Quantize K rows to e4m3 with UE8M0 scales and write them into their pages.

    A block of 64 values is stored as `x / 2^e`, rounded to nearest even, with
    `e = ceil(log2(max(amax, 1e-4) / 448))`. The last 64 values stay bf16. One launch.

    Args:
        k (torch.Tensor):
            Rows of shape `[N, 512]`, bf16: 448 values, then the rotary part.
        k_cache (torch.Tensor):
            Pages of shape `[num_blocks, page bytes]` or
            `[num_blocks, block_size, 584]`, uint8. The block stride may be padded.
        slot_mapping (torch.Tensor):
            Slots of the first T rows, of shape `[T]`, int64 or int32. A slot below 0 or
            beyond the cache writes nothing.
        block_size (int):
            Tokens per page.
        is_ue8m0 (bool):
            Must be true: the cache has no other scale format.

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
    check_slots(slot_mapping, k.shape[0])

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
