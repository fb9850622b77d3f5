# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keys of FP8 pages as CUDA's decode reads them: whole tokens in words, unpacked by
instructions that convert two values at once."""

from ..xpu_dsv4._decode_keys import key_pointers
from ..xpu_dsv4._pages import HEAD_DIM, MAX_EXPONENT, NOPE_DIM, QUANT_BLOCK
from ..xpu_dsv4._triton import tl, triton
from ..xpu_dsv4._ue8m0 import any_exponent_scale


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
def load_packed_tile(
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
    """A tile of keys as `load_packed_keys` gives them; those of slot -1 are 0."""
    # [BLOCK_N] each
    data_ptrs, scale_ptrs = key_pointers(
        slots,
        key_offs,
        topk_len,
        kv_ptr,
        swa_ptr,
        kv_block_stride,
        swa_block_stride,
        KV_BLOCK_SIZE,
        SWA_BLOCK_SIZE,
        HAS_TOPK,
    )
    return load_packed_keys(data_ptrs, scale_ptrs, slots >= 0)
