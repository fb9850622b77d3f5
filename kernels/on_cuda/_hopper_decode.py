# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse decode of 64 heads at a time on Hopper, in Gluon.

Eight warps make bf16 keys of FP8 pages, eight others multiply them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from ..xpu_dsv4._decode_keys import key_pointers, load_slots
from ..xpu_dsv4._pages import HEAD_DIM, MAX_EXPONENT, NOPE_DIM, QUANT_BLOCK
from ..xpu_dsv4._softmax import EMPTY_MAX
from ..xpu_dsv4._ue8m0 import any_exponent_scale
from ._hopper_attend import (
    KEY_TILES,
    attend,
    hand_over,
    key_tiles,
)

FILL_THREADS = 256
FILL_REGISTERS = 72
PART = 32
"""Keys that are unpacked at a time: a thread has 72 bytes of one, all in registers."""


@gluon.jit
def _parts(words, BITS: gl.constexpr, dtype: gl.constexpr):
    """The four parts of BITS bits of each word, along two new last axes of 2."""
    part0 = words.to(dtype)
    part1 = (words >> BITS).to(dtype)
    part2 = (words >> (2 * BITS)).to(dtype)
    part3 = (words >> (3 * BITS)).to(dtype)
    return gl.join(gl.join(part0, part2), gl.join(part1, part3))


@gluon.jit
def _e4m3_values(words, layout: gl.constexpr):
    """fp32 values `[N, 8 * W]` of int64 words of eight codes, `[N, W]`."""
    # [N, W, 2]
    halves = gl.join(words.to(gl.int32), (words >> 32).to(gl.int32))
    # [N, W, 2, 2, 2]
    codes = _parts(halves, 8, gl.uint8).to(gl.float8e4nv, bitcast=True)
    values = codes.to(gl.float16).to(gl.float32)
    values = gl.reshape(values, [words.shape[0], 8 * words.shape[1]])
    return gl.convert_layout(values, layout)


@gluon.jit
def _bf16_values(words, layout: gl.constexpr):
    """bf16 values `[N, 4 * W]` of int64 words of four, `[N, W]`."""
    values = _parts(words, 16, gl.int16).to(gl.bfloat16, bitcast=True)
    values = gl.reshape(values, [words.shape[0], 4 * words.shape[1]])
    return gl.convert_layout(values, layout)


@gluon.jit
def _beside(left, right):
    """`[N, 2 * D]` of two tensors `[N, D]`; a thread keeps what it has."""
    both = gl.permute(gl.join(left, right), (0, 2, 1))  # [N, 2, D]
    return gl.reshape(both, [left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _pointers(
    slots,
    key_offs,
    topk_len,
    kv_ptr,
    swa_ptr,
    kv_block_stride,
    swa_block_stride,
    KV_BLOCK_SIZE: gl.constexpr,
    SWA_BLOCK_SIZE: gl.constexpr,
    HAS_TOPK: gl.constexpr,
):
    """Pointers to the int64 words of keys, and to the int32 words of exponents."""
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
    return (
        data_ptrs.to(gl.pointer_type(gl.int64)),
        scale_ptrs.to(gl.pointer_type(gl.int32)),
    )


@gluon.jit
def _fill(
    keys,
    valid,
    filled,
    free,
    topk_row_ptr,
    swa_row_ptr,
    topk_len,
    first_key,
    last_key,
    kv_ptr,
    swa_ptr,
    num_kv_slots,
    num_swa_slots,
    kv_block_stride,
    swa_block_stride,
    KV_BLOCK_SIZE: gl.constexpr,
    SWA_BLOCK_SIZE: gl.constexpr,
    HAS_TOPK: gl.constexpr,
    NOPE_DIM: gl.constexpr,
    QUANT_BLOCK: gl.constexpr,
    MAX_EXPONENT: gl.constexpr,
    PART: gl.constexpr,
):
    """Fill the tiles, 16 keys at a time. The next 16 come meanwhile."""
    KEY_TILES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    BLOCKS: gl.constexpr = NOPE_DIM // QUANT_BLOCK
    CODES: gl.constexpr = QUANT_BLOCK // 8
    # A thread has eight codes of a block, and stores them as 16 bytes.
    words: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [gl.num_warps(), 1], [1, 0])
    pairs: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [gl.num_warps(), 1], [1, 0])
    values: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    part_offs = gl.arange(0, PART, gl.SliceLayout(1, words))
    code_offs = gl.arange(0, CODES, gl.SliceLayout(0, words))[None, :]
    pair_offs = gl.arange(0, QUANT_BLOCK // 4, gl.SliceLayout(0, pairs))[None, :]
    num_tiles = gl.maximum(gl.cdiv(last_key - first_key, BLOCK_N), 1)
    slots = load_slots(
        topk_row_ptr,
        swa_row_ptr,
        first_key + part_offs,
        topk_len,
        last_key,
        num_kv_slots,
        num_swa_slots,
        HAS_TOPK,
    )  # [PART]
    data_ptrs, scale_ptrs = _pointers(
        slots,
        first_key + part_offs,
        topk_len,
        kv_ptr,
        swa_ptr,
        kv_block_stride,
        swa_block_stride,
        KV_BLOCK_SIZE,
        SWA_BLOCK_SIZE,
        HAS_TOPK,
    )  # [PART] each
    slot_mask = slots >= 0  # [PART]
    codes = ()
    for block in gl.static_range(BLOCKS):
        codes += (  # type: ignore[assignment]
            gl.load(
                data_ptrs[:, None] + (block * CODES + code_offs),
                mask=slot_mask[:, None],
                other=0,
            ),
        )
    rope_ptrs = gl.convert_layout(data_ptrs, gl.SliceLayout(1, pairs))[:, None]
    rope_mask = gl.convert_layout(slot_mask, gl.SliceLayout(1, pairs))[:, None]
    rope = gl.load(rope_ptrs + (BLOCKS * CODES + pair_offs), mask=rope_mask, other=0)
    low = gl.load(scale_ptrs, mask=slot_mask, other=0)
    high = gl.load(scale_ptrs + 1, mask=slot_mask, other=0)
    next_slots = load_slots(
        topk_row_ptr,
        swa_row_ptr,
        first_key + PART + part_offs,
        topk_len,
        last_key,
        num_kv_slots,
        num_swa_slots,
        HAS_TOPK,
    )
    for tile in range(num_tiles):
        stage = tile % KEY_TILES
        mbarrier.wait(free.index(stage), (tile // KEY_TILES + 1) % 2)
        for number in gl.static_range(BLOCK_N // PART):
            part = keys.index(stage).slice(number * PART, PART, 0)
            valid.index(stage).slice(number * PART, PART, 0).store(
                (slots >= 0).to(gl.int32)
            )
            slots = next_slots
            key_offs = first_key + tile * BLOCK_N + (number + 1) * PART + part_offs
            data_ptrs, scale_ptrs = _pointers(
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
            next_slots = load_slots(
                topk_row_ptr,
                swa_row_ptr,
                key_offs + PART,
                topk_len,
                last_key,
                num_kv_slots,
                num_swa_slots,
                HAS_TOPK,
            )
            slot_mask = slots >= 0  # [PART]
            next_low = gl.load(scale_ptrs, mask=slot_mask, other=0)
            next_high = gl.load(scale_ptrs + 1, mask=slot_mask, other=0)
            next_codes = ()
            parts = ()
            for block in gl.static_range(BLOCKS):
                word = low if block < 4 else high
                exponents = (word >> (8 * (block % 4))) & 0xFF  # [PART]
                exponents = gl.where(exponents > MAX_EXPONENT, 255, exponents)
                scales = gl.convert_layout(
                    any_exponent_scale(exponents), gl.SliceLayout(1, values)
                )
                unpacked = _e4m3_values(codes[block], values) * scales[:, None]
                parts += (unpacked.to(gl.bfloat16),)  # type: ignore[assignment]
                next_codes += (  # type: ignore[assignment]
                    gl.load(
                        data_ptrs[:, None] + (block * CODES + code_offs),
                        mask=slot_mask[:, None],
                        other=0,
                    ),
                )
            codes = next_codes
            low = next_low
            high = next_high
            # One store: between two to the same tile all warps would wait.
            front = _beside(_beside(parts[0], parts[1]), _beside(parts[2], parts[3]))  # type: ignore[misc]
            rotary = _bf16_values(rope, values)
            back = _beside(_beside(parts[4], parts[5]), _beside(parts[6], rotary))  # type: ignore[misc]
            part.store(_beside(front, back))
            rope_ptrs = gl.convert_layout(data_ptrs, gl.SliceLayout(1, pairs))[:, None]
            rope_mask = gl.convert_layout(slot_mask, gl.SliceLayout(1, pairs))[:, None]
            rope = gl.load(
                rope_ptrs + (BLOCKS * CODES + pair_offs), mask=rope_mask, other=0
            )
        fence_async_shared()
        hand_over(filled, tile)


@gluon.jit(
    do_not_specialize=[
        "topk_width",
        "num_splits",
        "num_kv_slots",
        "num_swa_slots",
        "topk_stride",
    ],
)
def hopper_decode_kernel(
    q_ptr,
    kv_ptr,
    swa_ptr,
    topk_indices_ptr,
    topk_lens_ptr,
    swa_indices_ptr,
    swa_lens_ptr,
    sink_ptr,
    out_ptr,
    partial_ptr,
    num_heads,
    topk_width,
    swa_width,
    num_splits,
    num_kv_slots,
    num_swa_slots,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_block_stride,
    swa_block_stride,
    topk_stride,
    swa_stride,
    qk_scale,
    KV_BLOCK_SIZE: gl.constexpr,
    SWA_BLOCK_SIZE: gl.constexpr,
    HAS_TOPK: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr = HEAD_DIM,
    NOPE_DIM: gl.constexpr = NOPE_DIM,
    QUANT_BLOCK: gl.constexpr = QUANT_BLOCK,
    MAX_EXPONENT: gl.constexpr = MAX_EXPONENT,
    EMPTY_MAX: gl.constexpr = EMPTY_MAX,
    KEY_TILES: gl.constexpr = KEY_TILES,
    FILL_THREADS: gl.constexpr = FILL_THREADS,
    FILL_REGISTERS: gl.constexpr = FILL_REGISTERS,
    PART: gl.constexpr = PART,
):
    """As `_decode_kernel`, to bf16 or partials: one block of heads, over one split."""
    num_head_blocks = gl.cdiv(num_heads, BLOCK_H)
    block = gl.program_id(0)
    split = block // num_head_blocks % num_splits
    token = (block // num_head_blocks // num_splits).to(gl.int64)
    if HAS_TOPK:
        given_topk_len = gl.load(topk_lens_ptr + token)
        topk_len = gl.minimum(gl.maximum(given_topk_len, 0), topk_width).to(gl.int32)
    else:
        topk_len = gl.to_tensor(0)
    given_swa_len = gl.load(swa_lens_ptr + token)
    swa_len = gl.minimum(gl.maximum(given_swa_len, 0), swa_width).to(gl.int32)
    num_keys = topk_len + swa_len
    keys_per_split = gl.cdiv(gl.cdiv(num_keys, BLOCK_N), num_splits) * BLOCK_N
    first_key = split * keys_per_split
    last_key = gl.minimum(first_key + keys_per_split, num_keys)
    first_part = token * num_heads * num_splits + split
    num_parts = (gl.num_programs(0) // num_head_blocks).to(gl.int64) * num_heads
    keys, valid, filled, free = key_tiles(KEY_TILES, BLOCK_N, HEAD_DIM, 1)
    gl.warp_specialize(
        [
            (
                attend,
                (
                    keys,
                    valid,
                    filled,
                    free,
                    last_key - first_key,
                    q_ptr + token * q_token_stride,
                    q_head_stride,
                    block % num_head_blocks * BLOCK_H,
                    num_heads,
                    qk_scale,
                    sink_ptr,
                    out_ptr + token * out_token_stride,
                    out_head_stride,
                    partial_ptr + first_part * HEAD_DIM,
                    partial_ptr + num_parts * HEAD_DIM + first_part * 2,
                    num_splits,
                    HAS_SINK,
                    SPLIT,
                    BLOCK_H,
                    EMPTY_MAX,
                ),
            ),
            (
                _fill,
                (
                    keys,
                    valid,
                    filled,
                    free,
                    topk_indices_ptr + token * topk_stride,
                    swa_indices_ptr + token * swa_stride,
                    topk_len,
                    first_key,
                    last_key,
                    kv_ptr,
                    swa_ptr,
                    num_kv_slots,
                    num_swa_slots,
                    kv_block_stride,
                    swa_block_stride,
                    KV_BLOCK_SIZE,
                    SWA_BLOCK_SIZE,
                    HAS_TOPK,
                    NOPE_DIM,
                    QUANT_BLOCK,
                    MAX_EXPONENT,
                    PART,
                ),
            ),
        ],
        [FILL_THREADS // 32],
        [FILL_REGISTERS],
    )
