# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantization of K rows into FP8 KV pages; `_pages` describes the layout of a page."""

import torch

from .._checks import check_dtype, check_inner_contiguous, check_shape, fail
from .._pages import (
    HEAD_DIM,
    NOPE_DIM,
    QUANT_BLOCK,
    SCALE_BYTES,
    TOKEN_BYTES,
)
from .._pairs import pack_bf16
from .._triton import tl, triton
from .._ue8m0 import e4m3_code, e4m3_exponent, exponent_inverse

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
