# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The main cache's compressor: a block of tokens becomes one FP8 page entry.

An entry is a mean over a window of tokens, weighted channel by channel with a softmax
over the tokens. A program walks over the window and holds only a running maximum, the
sum of the weights and the weighted sum of each channel; the channels are spread over
its sub-groups. All tokens at once would be 128 x 512 scores and as many values.

Source: Online normalizer calculation for softmax, arXiv:1805.02867.
"""

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_once,
    check_same_device,
    check_shape,
    fail,
)
from .._launch import launch_options
from .._pages import HEAD_DIM, NOPE_DIM, ROPE_DIM, check_page_cache
from .._pairs import check_rotary, load_rotation, rotate, round_to_bf16
from .._softmax import EMPTY_MAX, LOG2E
from .._triton import tl, triton
from ._kv_quant import check_slots, insert_row, row_words

FORMS = ((4, True), (128, False))
"""Ratios, and whether an entry also sees the block before its own."""
PAIR_BYTES = 8
"""Of two fp32 values, which one load fetches."""
UNROLLED = 8
"""Tokens whose loads are issued before the first of them is needed."""
NUM_WARPS = 8
"""Of 32 lanes, each of which has one pair of channels of an entry."""


@triton.jit
def _unpack_fp32(word):
    """The two fp32 values of an int64 word: (low half, high half); element-wise."""
    even = word.to(tl.int32).to(tl.float32, bitcast=True)
    odd = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def _take_token(score, value, largest, total, weighted, LOG2E: tl.constexpr = LOG2E):
    """Take a token's score and value into a running softmax; element-wise.

    One of the two exponentials is always that of 0: the new token's where it is the
    largest, else that of what was summed before.

    Returns:
        The new maximum, sum of the weights and weighted sum.

    """
    difference = score - largest
    smaller = tl.exp2(tl.abs(difference) * -LOG2E)
    is_largest = difference > 0.0
    kept = tl.where(is_largest, smaller, 1.0)
    weight = tl.where(is_largest, 1.0, smaller)
    # NaN is not above the maximum: it stays what it was, and the sums become NaN.
    largest = tl.where(is_largest, score, largest)
    return largest, total * kept + weight, weighted * kept + weight * value


@triton.jit
def _mean(total, weighted):
    """The weighted mean, 0 where there was no token; element-wise."""
    has_tokens = total != 0.0
    return tl.where(has_tokens, weighted / tl.where(has_tokens, total, 1.0), 0.0)


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_blocks",
        "num_slots",
        "table_width",
        "table_stride",
    ],
    # State pairs: where Triton knows of 16 bytes it gives a lane two of them, and half
    # of the lanes repeat what the others do.
    do_not_specialize_on_alignment=[
        "state_ptr",
        "requests_ptr",
        "positions_ptr",
        "state_slots_ptr",
        "block_table_ptr",
        "slots_ptr",
    ],
)
def _compress_insert_kernel(
    state_ptr,
    requests_ptr,
    positions_ptr,
    state_slots_ptr,
    block_table_ptr,
    weight_ptr,
    cos_sin_ptr,
    cache_ptr,
    slots_ptr,
    eps,
    num_requests,
    num_blocks,
    num_slots,
    max_position,
    table_width,
    table_stride,
    state_block_stride,
    state_row_stride,
    cos_sin_stride,
    cache_block_stride,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    STATE_WIDTH: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLLED: tl.constexpr = UNROLLED,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    NOPE_DIM: tl.constexpr = NOPE_DIM,
):
    """The entry of one token, if that token ends one."""
    NOPE_WORDS: tl.constexpr = NOPE_DIM // 2
    HALF_ROPE: tl.constexpr = (HEAD_DIM - NOPE_DIM) // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    state_slot = tl.load(state_slots_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    request = tl.load(requests_ptr + token).to(tl.int64)
    ends_entry = (position >= 0) & ((position + 1) % RATIO == 0)
    has_place = (state_slot >= 0) & (slot >= 0) & (slot < num_slots)
    has_table = (request >= 0) & (request < num_requests)
    if ends_entry & has_place & has_table:
        word_offs = row_words()  # [8, 32]
        table_ptr = block_table_ptr + request * table_stride
        first = (position - (WINDOW - 1)).to(tl.int32)
        zeros = tl.zeros(word_offs.shape, tl.float32)  # [8, 32]
        even_max, odd_max = zeros + EMPTY_MAX, zeros + EMPTY_MAX  # [8, 32] each
        even_total, odd_total = zeros, zeros  # [8, 32] each
        even_sum, odd_sum = zeros, zeros  # [8, 32] each
        for start in range(0, WINDOW, UNROLLED):
            for step in tl.static_range(UNROLLED):
                index = start + step
                place = first + index
                page = place // STATE_BLOCK
                in_table = (place >= 0) & (page < table_width)
                block = tl.load(table_ptr + page, mask=in_table, other=-1)
                exists = (block >= 0) & (block < num_blocks)
                row = block.to(tl.int64) * state_block_stride
                row += place % STATE_BLOCK * state_row_stride
                # Of an overlapping window, the second half has columns of its own.
                column = index // RATIO * HEAD_DIM
                value_ptr = state_ptr + tl.where(exists, row, 0) + column
                score_ptr = value_ptr + STATE_WIDTH
                value_words_ptr = value_ptr.to(tl.pointer_type(tl.int64))
                score_words_ptr = score_ptr.to(tl.pointer_type(tl.int64))
                values = tl.load(value_words_ptr + word_offs)  # [8, 32]
                scores = tl.load(score_words_ptr + word_offs)  # [8, 32]
                value_even, value_odd = _unpack_fp32(values)  # [8, 32] each
                score_even, score_odd = _unpack_fp32(scores)  # [8, 32] each
                # [8, 32] each
                even_max, even_total, even_sum = _take_token(
                    tl.where(exists, score_even, float("-inf")),
                    tl.where(exists, value_even, 0.0),
                    even_max,
                    even_total,
                    even_sum,
                )
                # [8, 32] each
                odd_max, odd_total, odd_sum = _take_token(
                    tl.where(exists, score_odd, float("-inf")),
                    tl.where(exists, value_odd, 0.0),
                    odd_max,
                    odd_total,
                    odd_sum,
                )
        even, odd = _mean(even_total, even_sum), _mean(odd_total, odd_sum)  # [8, 32]
        squares = tl.sum(tl.sum(even * even + odd * odd, axis=1), axis=0)
        rms_scale = tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)
        weight_even = tl.load(weight_ptr + 2 * word_offs).to(tl.float32)  # [8, 32]
        weight_odd = tl.load(weight_ptr + 2 * word_offs + 1).to(tl.float32)  # [8, 32]
        even = even * rms_scale * weight_even  # [8, 32]
        odd = odd * rms_scale * weight_odd  # [8, 32]

        rope_mask = word_offs >= NOPE_WORDS  # [8, 32]
        # [8, 32] each
        cos, sin = load_rotation(
            cos_sin_ptr,
            cos_sin_stride,
            position - (RATIO - 1),
            max_position,
            word_offs - NOPE_WORDS,
            rope_mask,
            HALF_ROPE,
        )
        even, odd = rotate(even, odd, cos, sin, rope_mask)  # [8, 32] each
        # What is quantized is rounded to bf16 before, as the uncompressed keys are.
        even = tl.where(rope_mask, even, round_to_bf16(even))  # [8, 32]
        odd = tl.where(rope_mask, odd, round_to_bf16(odd))  # [8, 32]
        insert_row(even, odd, cache_ptr, slot, cache_block_stride, BLOCK_SIZE)


def compress_norm_rope_insert(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    compress_ratio: int,
    overlap: bool,
) -> None:
    """Write the page entry of each token that ends a block of `compress_ratio` tokens.

    With x the values and s the scores of the tokens t of a window, an entry is
    `sum_t exp(s_t) x_t / sum_t exp(s_t)` for each of 512 channels, then
    `x * rsqrt(mean(x^2) + eps) * weight`, all in fp32. The last 64 channels are rotated
    by interleaved RoPE at the position of the block's first token and rounded to bf16.
    The others are rounded to bf16 and stored as `xpu_qnorm_rope_kv_fp8_insert` does.
    The window is the block. With `overlap` the block before it comes first, where the
    request has one, with the first 512 columns of its states; the block's own tokens
    have the second 512. The sums run in the order of the tokens. One launch.

    Args:
        state_cache (torch.Tensor):
            States of the tokens, of shape `[num_blocks, block_size, 2 * W]`, fp32: W
            values, then W scores, W = 512, or 1024 with `overlap`. Blocks and rows may
            be padded to a multiple of 8 bytes.
        token_to_req_indices (torch.Tensor):
            Row of `block_table` of each token, of shape `[T or more]`, int32 or int64.
        positions (torch.Tensor):
            Position of each token in its request, of shape `[T or more]`, int64 or
            int32.
        slot_mapping (torch.Tensor):
            Slots of the tokens' own states, of shape `[T]`, int64 or int32. Only the
            sign counts: a token with a negative one is none.
        block_table (torch.Tensor):
            Blocks of `state_cache` of each request, of shape `[num_reqs, max_blocks]`,
            int32 or int64. A token of the window that no valid block holds is left out.
        rms_norm_weight (torch.Tensor):
            Weight of the norm, of shape `[512]`, bf16 or fp32.
        rms_norm_eps (float):
            Added to the mean square.
        cos_sin_cache (torch.Tensor):
            Table of shape `[max_position, 64]`, fp32 or bf16: 32 cosines, then 32
            sines. A position outside the table leaves the entry unrotated.
        k_cache (torch.Tensor):
            Pages of shape `[num_blocks, block_size, 584]`, uint8, written in place. The
            block stride may be padded.
        kv_slot_mapping (torch.Tensor):
            Slots of the entries, of shape `[T or more]`, int64 or int32. A slot below 0
            or beyond the cache writes nothing.
        compress_ratio (int):
            Tokens per entry: 4 with `overlap`, or 128 without.
        overlap (bool):
            Whether an entry also sees the block before its own.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    overlap = bool(overlap)
    check_once(
        _check,
        state_cache,
        token_to_req_indices,
        positions,
        slot_mapping,
        block_table,
        rms_norm_weight,
        rms_norm_eps,
        cos_sin_cache,
        k_cache,
        kv_slot_mapping,
        compress_ratio,
        overlap,
    )
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    _compress_insert_kernel[(tokens,)](
        state_cache,
        token_to_req_indices,
        positions,
        slot_mapping,
        block_table,
        rms_norm_weight,
        cos_sin_cache,
        k_cache,
        kv_slot_mapping,
        rms_norm_eps,
        block_table.shape[0],
        state_cache.shape[0],
        k_cache.shape[0] * k_cache.shape[1],
        cos_sin_cache.shape[0],
        block_table.shape[1],
        block_table.stride(0),
        state_cache.stride(0),
        state_cache.stride(1),
        cos_sin_cache.stride(0),
        k_cache.stride(0),
        RATIO=compress_ratio,
        WINDOW=(1 + overlap) * compress_ratio,
        STATE_WIDTH=state_cache.shape[2] // 2,
        STATE_BLOCK=state_cache.shape[1],
        BLOCK_SIZE=k_cache.shape[1],
        **launch_options(k_cache.device, num_warps=NUM_WARPS),
    )


def _check(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    compress_ratio: int,
    overlap: bool,
) -> None:
    """Raise unless the arguments of `compress_norm_rope_insert` fit together."""
    if (compress_ratio, overlap) not in FORMS:
        fail("compress_ratio, overlap", (compress_ratio, overlap), f"one of {FORMS}")
    _check_states(state_cache, 2 * (1 + overlap) * HEAD_DIM)
    check_slots(slot_mapping, positions.shape[0])
    for name, given in (
        ("token_to_req_indices", token_to_req_indices),
        ("kv_slot_mapping", kv_slot_mapping),
    ):
        _check_tokens(name, given, slot_mapping.shape[0])
    check_dtype("block_table", block_table, torch.int32, torch.int64)
    check_shape("block_table", block_table, None, None)
    check_inner_contiguous("block_table", block_table)
    check_dtype("rms_norm_weight", rms_norm_weight, torch.bfloat16, torch.float32)
    check_shape("rms_norm_weight", rms_norm_weight, HEAD_DIM)
    check_inner_contiguous("rms_norm_weight", rms_norm_weight)
    if rms_norm_eps < 0:
        fail("rms_norm_eps", rms_norm_eps, "a number of at least 0")
    check_rotary(positions, cos_sin_cache, positions.shape[0], ROPE_DIM)
    if k_cache.dim() != 3:
        fail("k_cache.shape", list(k_cache.shape), "[num_blocks, block_size, 584]")
    check_page_cache("k_cache", k_cache, k_cache.shape[1])
    check_same_device(
        state_cache=state_cache,
        token_to_req_indices=token_to_req_indices,
        positions=positions,
        slot_mapping=slot_mapping,
        block_table=block_table,
        rms_norm_weight=rms_norm_weight,
        cos_sin_cache=cos_sin_cache,
        k_cache=k_cache,
        kv_slot_mapping=kv_slot_mapping,
    )


def _check_tokens(name: str, tensor: torch.Tensor, tokens: int) -> None:
    """Raise unless `tensor` is a vector of integers for at least `tokens` tokens."""
    check_dtype(name, tensor, torch.int64, torch.int32)
    check_shape(name, tensor, None)
    check_inner_contiguous(name, tensor)
    if tensor.shape[0] < tokens:
        fail(f"{name}.shape[0]", tensor.shape[0], f"at least {tokens}")


def _check_states(state_cache: torch.Tensor, columns: int) -> None:
    """Raise unless `state_cache` holds rows of `columns` fp32 that pairs can read."""
    check_dtype("state_cache", state_cache, torch.float32)
    check_shape("state_cache", state_cache, None, None, columns)
    check_inner_contiguous("state_cache", state_cache)
    blocks, block_size, _ = state_cache.shape
    if blocks == 0 or block_size == 0:
        fail("state_cache.shape", list(state_cache.shape), "at least one row")
    block_stride, row_stride, _ = state_cache.stride()
    if (blocks > 1 and block_stride % 2) or (block_size > 1 and row_stride % 2):
        fail("state_cache.stride()", state_cache.stride(), "even strides between rows")
    if state_cache.device.type != "meta" and state_cache.data_ptr() % PAIR_BYTES:
        address = hex(state_cache.data_ptr())
        fail("state_cache.data_ptr()", address, f"a multiple of {PAIR_BYTES}")
