# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading tokens of FP8 KV pages; `_pages` tells how a page is laid out."""

from ._triton import tl, triton


@triton.jit
def token_pointers(cache_ptr, slot, block_stride, BLOCK_SIZE: tl.constexpr):
    """Pointers to the 576 data bytes and to the 8 exponent bytes of each slot."""
    block = slot // BLOCK_SIZE
    position = slot - block * BLOCK_SIZE
    page = cache_ptr + block.to(tl.int64) * block_stride
    data = page + position.to(tl.int32) * 576
    exponents = page + BLOCK_SIZE * 576 + position.to(tl.int32) * 8
    return data, exponents


@triton.jit
def load_exponents(exponents_ptr, mask):
    """The eight exponent bytes of each token as one int64."""
    words = exponents_ptr.to(tl.pointer_type(tl.int64))
    return tl.load(words, mask=mask, other=0)


@triton.jit
def load_nope_codes(data_ptr, dims, mask, CHUNK: tl.constexpr):
    """e4m3 codes of the CHUNK-th 64 dims, `[N, 64]` uint8; masked rows are zero."""
    return tl.load(
        data_ptr[:, None] + (CHUNK * 64 + dims)[None, :], mask=mask[:, None], other=0
    )


@triton.jit
def load_rope(data_ptr, dims, mask):
    """The bf16 rotary part, `[N, 64]`; masked rows are zero."""
    rope = (data_ptr + 448).to(tl.pointer_type(tl.bfloat16))
    return tl.load(rope[:, None] + dims[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def e4m3_shifted(codes):
    """fp32 numbers value * 2^-120 of uint8 e4m3 codes; the NaN codes give 480 * 2^-120.

    A code's sign goes to bit 31 and its seven other bits to bits 26..20, which is exact
    for subnormal codes too. The caller's scale makes up for 2^120.
    """
    shifted = codes.to(tl.int8, bitcast=True).to(tl.int32) << 20
    return (shifted & -0x78100000).to(tl.float32, bitcast=True)


@triton.jit
def dequantize(codes, exponents, CHUNK: tl.constexpr):
    """bf16 values of e4m3 `codes [N, 64]` under byte CHUNK of `exponents [N, 1]`.

    Exact in bf16, since an e4m3 value has four significant bits.
    """
    exponent = ((exponents >> (8 * CHUNK)) & 0xFF).to(tl.int32)
    scale = ((tl.minimum(exponent, 134) + 120) << 23).to(tl.float32, bitcast=True)
    return (e4m3_shifted(codes) * scale).to(tl.bfloat16)


@triton.jit
def dequantize_exact(codes, exponent):
    """bf16 values of e4m3 `codes` under int32 UE8M0 `exponent`, for all 256 exponents.

    The two factors 2^120 and 2^(exponent - 127) are applied one after the other; the
    second is a subnormal number for exponent 0.
    """
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    scale = bits.to(tl.float32, bitcast=True)
    return (e4m3_shifted(codes) * 1.329227995784916e36 * scale).to(tl.bfloat16)
