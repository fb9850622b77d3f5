# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading tokens of FP8 KV pages; `_pages` describes the layout of a page."""

from ._pages import (
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
