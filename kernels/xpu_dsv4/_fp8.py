# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading tokens of FP8 KV pages; `_pages` describes the layout of a page."""

from ._pages import (
    HEAD_DIM,
    MAX_EXPONENT,
    NOPE_DIM,
    QUANT_BLOCK,
    SCALE_BYTES,
    TOKEN_BYTES,
)
from ._triton import tl, triton
from ._ue8m0 import any_exponent_scale, exponent_scale

E4M3_SHIFT = 120
"""`e4m3_shifted` gives values times 2^-120."""


@triton.jit
def token_pointers(
    cache_ptr,
    slots,  # [N]
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_BYTES: tl.constexpr = TOKEN_BYTES,
    SCALE_BYTES: tl.constexpr = SCALE_BYTES,
):
    """Pointers to the data bytes and to the exponent bytes of each slot, both `[N]`."""
    blocks = slots // BLOCK_SIZE  # [N]
    token_offs = slots - blocks * BLOCK_SIZE  # [N]
    page_ptrs = cache_ptr + blocks.to(tl.int64) * block_stride  # [N]
    data_ptrs = page_ptrs + token_offs.to(tl.int32) * TOKEN_BYTES  # [N]
    # [N]
    scale_ptrs = (
        page_ptrs + BLOCK_SIZE * TOKEN_BYTES + token_offs.to(tl.int32) * SCALE_BYTES
    )
    return data_ptrs, scale_ptrs


@triton.jit
def load_exponents(
    scale_ptrs,  # [N]
    token_mask,  # [N]
):
    """The eight exponent bytes of each token as one int64, `[N]`; masked ones are 0."""
    word_ptrs = scale_ptrs.to(tl.pointer_type(tl.int64))  # [N]
    return tl.load(word_ptrs, mask=token_mask, other=0)


@triton.jit
def load_nope_codes(
    data_ptrs,  # [N]
    dim_offs,  # [64]
    token_mask,  # [N]
    BLOCK: tl.constexpr,
    QUANT_BLOCK: tl.constexpr = QUANT_BLOCK,
):
    """uint8 e4m3 codes of quantization block BLOCK, `[N, 64]`; masked rows are 0."""
    code_ptrs = data_ptrs[:, None] + dim_offs[None, :]  # [N, 64]
    return tl.load(code_ptrs + BLOCK * QUANT_BLOCK, mask=token_mask[:, None], other=0)


@triton.jit
def load_rope(
    data_ptrs,  # [N]
    dim_offs,  # [64]
    token_mask,  # [N]
    NOPE_DIM: tl.constexpr = NOPE_DIM,
):
    """The rotary part in bf16, `[N, 64]`; masked rows are 0."""
    rope_ptrs = (data_ptrs + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))  # [N]
    return tl.load(
        rope_ptrs[:, None] + dim_offs[None, :], mask=token_mask[:, None], other=0.0
    )


@triton.jit
def e4m3_shifted(code):
    """The fp32 value of a uint8 e4m3 code times 2^-120, 480 * 2^-120 for NaN.

    Element-wise. The code's sign goes to bit 31 and its seven other bits to bits
    26..20, which is exact for subnormal codes too. The caller multiplies by 2^120.
    """
    MANTISSA_BITS_GAINED: tl.constexpr = 23 - 3
    SIGN_AND_CODE: tl.constexpr = -0x78100000
    bits = code.to(tl.int8, bitcast=True).to(tl.int32) << MANTISSA_BITS_GAINED
    return (bits & SIGN_AND_CODE).to(tl.float32, bitcast=True)


@triton.jit
def dequantize(
    codes,  # [N, 64] uint8
    exponents,  # [N, 1] int64
    BLOCK: tl.constexpr,
    MAX_EXPONENT: tl.constexpr = MAX_EXPONENT,
    E4M3_SHIFT: tl.constexpr = E4M3_SHIFT,
):
    """bf16 values `[N, 64]` of e4m3 codes under byte BLOCK of their exponents.

    Exact in bf16, since an e4m3 value has four significant bits.
    """
    exponent = ((exponents >> (8 * BLOCK)) & 0xFF).to(tl.int32)  # [N, 1]
    # The exponent after the largest gives the bits of infinity.
    exponent = tl.minimum(exponent, MAX_EXPONENT + 1)  # [N, 1]
    scale = exponent_scale(exponent + E4M3_SHIFT)  # [N, 1]
    return (e4m3_shifted(codes) * scale).to(tl.bfloat16)


@triton.jit
def load_packed_keys(
    data_ptrs,  # [N]
    scale_ptrs,  # [N]
    token_mask,  # [N]
    NOPE_DIM: tl.constexpr = NOPE_DIM,
    QUANT_BLOCK: tl.constexpr = QUANT_BLOCK,
):
    """Whole tokens as they lie in a page; masked ones are 0.

    A loop can hold the words of a tile until the next turn: bytes and halves would take
    a register each. Loaded one by one, blocks are a thread's own: which axis of a
    3-dim load a thread gets differs between Triton 3.6 and 3.7.

    Returns:
        (codes, rope, low, high): int32 words of four e4m3 codes, `[N, 16, 8]` with the
        block as the last axis and 0 in block 7, int64 words of four bf16 values of the
        rotary part, `[N, 16]`, and int32 words of the exponents of blocks 0 to 3 and 4
        to 6, `[N]` each.

    """
    WORDS: tl.constexpr = QUANT_BLOCK // 4
    word_offs = tl.arange(0, WORDS)[None, :]  # [1, WORDS]
    row_mask = token_mask[:, None]  # [N, 1]
    # [N, WORDS]
    code_ptrs = data_ptrs.to(tl.pointer_type(tl.int32))[:, None] + word_offs
    # [N, WORDS] each
    codes0 = tl.load(code_ptrs + 0 * WORDS, mask=row_mask, other=0)
    codes1 = tl.load(code_ptrs + 1 * WORDS, mask=row_mask, other=0)
    codes2 = tl.load(code_ptrs + 2 * WORDS, mask=row_mask, other=0)
    codes3 = tl.load(code_ptrs + 3 * WORDS, mask=row_mask, other=0)
    codes4 = tl.load(code_ptrs + 4 * WORDS, mask=row_mask, other=0)
    codes5 = tl.load(code_ptrs + 5 * WORDS, mask=row_mask, other=0)
    codes6 = tl.load(code_ptrs + 6 * WORDS, mask=row_mask, other=0)
    codes7 = tl.zeros_like(codes0)
    # [N, WORDS, 2, 2] each
    even = tl.join(tl.join(codes0, codes4), tl.join(codes2, codes6))
    odd = tl.join(tl.join(codes1, codes5), tl.join(codes3, codes7))
    # [N, WORDS, 8]
    codes = tl.reshape(tl.join(even, odd), [data_ptrs.shape[0], WORDS, 8])
    rope_ptrs = (data_ptrs + NOPE_DIM).to(tl.pointer_type(tl.int64))  # [N]
    # [N, WORDS]
    rope = tl.load(rope_ptrs[:, None] + word_offs, mask=row_mask, other=0)
    # Two words: 64-bit shifts would be slower.
    exponent_ptrs = scale_ptrs.to(tl.pointer_type(tl.int32))  # [N]
    low = tl.load(exponent_ptrs, mask=token_mask, other=0)  # [N]
    high = tl.load(exponent_ptrs + 1, mask=token_mask, other=0)  # [N]
    return codes, rope, low, high


@triton.jit
def _quarters(words, BITS: tl.constexpr, dtype: tl.constexpr):
    """The four parts of BITS bits of each word, along two new last axes of 2."""
    part0 = words.to(dtype)
    part1 = (words >> BITS).to(dtype)
    part2 = (words >> (2 * BITS)).to(dtype)
    part3 = (words >> (3 * BITS)).to(dtype)
    return tl.join(tl.join(part0, part2), tl.join(part1, part3))


@triton.jit
def unpack_keys(
    codes,  # [N, 16, 8] int32
    rope,  # [N, 16] int64
    low,  # [N] int32
    high,  # [N] int32
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    NOPE_DIM: tl.constexpr = NOPE_DIM,
    QUANT_BLOCK: tl.constexpr = QUANT_BLOCK,
    MAX_EXPONENT: tl.constexpr = MAX_EXPONENT,
):
    """Tokens of `load_packed_keys` in bf16, `[N, HEAD_DIM]`.

    CUDA converts two e4m3 codes to fp16, and two fp32 values to bf16, in one
    instruction each. Exact, but for results below the normal numbers of bf16.
    """
    block_offs = tl.arange(0, HEAD_DIM // QUANT_BLOCK)[None, :]  # [1, 8]
    words = tl.where(block_offs < 4, low[:, None], high[:, None])  # [N, 8]
    exponents = (words >> (8 * (block_offs % 4))) & 0xFF  # [N, 8]
    exponents = tl.where(exponents > MAX_EXPONENT, 255, exponents)  # [N, 8]
    scales = any_exponent_scale(exponents).to(tl.bfloat16)  # [N, 8]
    # [N, 16, 8, 2, 2] each
    nope = _quarters(codes, 8, tl.uint8).to(tl.float8e4nv, bitcast=True)
    nope = nope.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    nope *= scales[:, None, :, None, None]
    # [N, 16, 2, 2]
    rotary = _quarters(rope, 16, tl.int16).to(tl.bfloat16, bitcast=True)
    rope_mask = block_offs * QUANT_BLOCK == NOPE_DIM  # [1, 8]
    # [N, 16, 8, 2, 2]
    keys = tl.where(rope_mask[:, None, :, None, None], rotary[:, :, None, :, :], nope)
    # [N, 8, 16, 2, 2]
    keys = tl.permute(keys, (0, 2, 1, 3, 4))
    return tl.reshape(keys, [codes.shape[0], HEAD_DIM])


@triton.jit
def dequantize_exact(
    codes,  # [N, D] uint8
    exponents,  # [N, D] int32
    E4M3_SHIFT: tl.constexpr = E4M3_SHIFT,
):
    """bf16 values `[N, D]` of e4m3 codes, exact for all UE8M0 exponents but 255.

    The factors 2^120 and 2^(exponent - 127) are applied one after the other.
    """
    NAN_CODE: tl.constexpr = 0x7F
    scales = any_exponent_scale(exponents)  # [N, D]
    values = e4m3_shifted(codes) * 2.0**E4M3_SHIFT * scales  # [N, D]
    nan_mask = (codes & NAN_CODE) == NAN_CODE  # [N, D]
    return tl.where(nan_mask, float("nan"), values).to(tl.bfloat16)
