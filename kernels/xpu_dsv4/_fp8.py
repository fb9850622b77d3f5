# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading the 584-byte tokens of DeepSeek-V4's FP8 KV pages.

A page of `block_size` tokens is planar: 576 bytes a token (448 e4m3 values, then 64
bf16 values that carry the rotary part), then 8 bytes a token (seven UE8M0 exponents,
one for each 64 e4m3 values, and one byte of padding), then padding up to the block
stride of the cache. Pages hold finite e4m3 codes and exponents up to 134, a scale of
2^7: the insert kernels saturate, and a normalized key never comes near 57,344.
"""

import torch

from ._checks import check_dtype, check_inner_contiguous, fail
from ._triton import tl, triton

HEAD_DIM = 512
NOPE_DIM = 448
ROPE_DIM = 64
QUANT_BLOCK = 64
TOKEN_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = 8
PAGE_ALIGNMENT = 8


def as_pages(name: str, cache: torch.Tensor) -> torch.Tensor:
    """`[num_blocks, block_size, 584]` view of uint8 FP8 pages, or ValueError.

    vLLM hands pages over so, or with an axis of one head before the last, as FlashMLA
    takes them. Only the block stride may be padded. Pages start at multiples of 8
    bytes, so that one 64-bit load fetches the exponents of a token.
    """
    check_dtype(name, cache, torch.uint8)
    width = TOKEN_BYTES + SCALE_BYTES
    pages = cache.squeeze(2) if cache.dim() == 4 and cache.shape[2] == 1 else cache
    if pages.dim() != 3 or pages.shape[2] != width or pages.shape[1] < 1:
        want = f"[num_blocks, block_size, (1,) {width}]"
        fail(f"{name}.shape", list(cache.shape), want)
    check_inner_contiguous(name, pages)
    if pages.shape[1] > 1 and pages.stride(1) != width:
        fail(f"{name}.stride(1)", pages.stride(1), f"{width}, dense tokens in a page")
    if pages.shape[0] > 1 and (
        pages.stride(0) % PAGE_ALIGNMENT or pages.stride(0) < pages.shape[1] * width
    ):
        fail(
            f"{name}.stride(0)",
            pages.stride(0),
            f"a multiple of {PAGE_ALIGNMENT}, at least {pages.shape[1] * width}",
        )
    if pages.device.type != "meta" and pages.data_ptr() % PAGE_ALIGNMENT:
        fail(
            f"{name}.data_ptr()",
            hex(pages.data_ptr()),
            f"a multiple of {PAGE_ALIGNMENT}",
        )
    return pages


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
def dequantize(codes, exponents, CHUNK: tl.constexpr):
    """bf16 values of e4m3 `codes [N, 64]` under byte CHUNK of `exponents [N, 1]`.

    Shifting a code's sign to bit 31 and its seven other bits to bits 26..20 gives the
    fp32 number value * 2^-120, subnormals included; 2^120 joins the scale. Exact in
    bf16, since an e4m3 value has four significant bits.
    """
    shifted = codes.to(tl.int8, bitcast=True).to(tl.int32) << 20
    value = (shifted & -0x78100000).to(tl.float32, bitcast=True)
    exponent = ((exponents >> (8 * CHUNK)) & 0xFF).to(tl.int32)
    scale = ((tl.minimum(exponent, 134) + 120) << 23).to(tl.float32, bitcast=True)
    return (value * scale).to(tl.bfloat16)


@triton.jit
def dequantize_exact(codes, exponent):
    """bf16 values of e4m3 `codes` under int32 UE8M0 `exponent`, for all 256 exponents.

    The two factors 2^120 and 2^(exponent - 127) are applied one after the other; the
    second is a subnormal number for exponent 0.
    """
    shifted = codes.to(tl.int8, bitcast=True).to(tl.int32) << 20
    value = (shifted & -0x78100000).to(tl.float32, bitcast=True)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    scale = bits.to(tl.float32, bitcast=True)
    return (value * 1.329227995784916e36 * scale).to(tl.bfloat16)
