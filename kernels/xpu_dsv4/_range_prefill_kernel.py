# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill attention whose keys are ranges of rows, for a few heads on Intel GPUs.

The rows of a tile are the heads of queries that follow each other, which have nearly
all keys in common: a tile loads those of all its queries once, and each row leaves out
what it does not see. No key has an index, so 2-dim block loads bring queries, keys and
values straight into the operands of matrix instructions; weights alone go through
shared local memory. Scores have keys as rows: keys are then the left operand as they
lie in memory, and a lane adds up and compares the scores of a query by itself.
"""

from ._output import block_scale, first_blocks
from ._pages import HEAD_DIM
from ._pairs import load_rotation, round_to_bf16
from ._softmax import EMPTY_MAX, MOST_RISE, softmax_factor
from ._triton import tl, triton
from ._ue8m0 import e4m3_code, exponent_scale

TILE_DIM = 64
"""Dims of one tile."""


@triton.jit
def _first_tile(begin, request, num_heads, BLOCK_M: tl.constexpr):
    """The first tile of a request whose first token is `begin`. The requests before it
    have a tile each for a part at the end, so its number needs no sum over them."""
    return begin * num_heads // BLOCK_M + request


@triton.jit
def _find_tile(
    starts_ptr,
    num_requests,
    num_heads,
    tile,
    BLOCK_M: tl.constexpr,
):
    """The request of a tile, its first token and the one behind its last, and the first
    row of the tile in it, which is behind its last row where the tile has none."""
    base = tl.load(starts_ptr)
    request = 0
    behind = num_requests
    begin = 0
    end = tl.load(starts_ptr + num_requests) - base
    first_row = tile * BLOCK_M
    while behind - request > 1:
        middle = (request + behind) // 2
        token = tl.load(starts_ptr + middle) - base
        tiles = tile - _first_tile(token, middle, num_heads, BLOCK_M)
        is_before = tiles >= 0
        request = tl.where(is_before, middle, request)
        behind = tl.where(is_before, behind, middle)
        begin = tl.where(is_before, token, begin)
        end = tl.where(is_before, end, token)
        first_row = tl.where(is_before, tiles * BLOCK_M, first_row)
    return request, begin, end, first_row


@triton.jit
def _add_values(
    acc,  # [BLOCK_M, 64] fp32
    p,  # [BLOCK_M, BLOCK_N] bf16
    value_ptrs,  # [BLOCK_N, 64]
    start,
    end,
    TILE: tl.constexpr,
    TILE_DIM: tl.constexpr = TILE_DIM,
):
    """`acc` plus the values that `p` weighs.

    The product stands behind a branch that is always taken, in turns as in
    `_dims_first`.
    """
    keys_left = start < end if TILE % 2 == 0 else end > start
    if keys_left:
        tile_ptr = tl.advance(value_ptrs, (0, TILE * TILE_DIM))  # [BLOCK_N, 64]
        v = tl.load(tile_ptr, boundary_check=(0,), padding_option="zero")
        acc = tl.dot(p, v, acc)
    return acc


@triton.jit
def _store_tile(
    out_ptrs,  # [BLOCK_M, 64]
    acc,  # [BLOCK_M, 64] fp32
    factor,  # [BLOCK_M, 1] fp32
    row_mask,  # [BLOCK_M, 1]
):
    """Store an accumulator times `factor` in bf16."""
    tl.store(out_ptrs, (acc * factor).to(tl.bfloat16), mask=row_mask)


@triton.jit
def _rounded(
    acc,  # [BLOCK_M, 64] fp32
    factor,  # [BLOCK_M, 1] fp32
):
    """An accumulator times `factor`, rounded to bf16 and still in fp32."""
    return round_to_bf16(acc * factor)


@triton.jit
def _rotate_tile_back(
    x,  # [BLOCK_M, 64] fp32
    tokens,  # [BLOCK_M]
    positions_ptr,
    cos_sin_ptr,
    max_position,
    cos_sin_stride,
    BLOCK_M: tl.constexpr,
    TILE_DIM: tl.constexpr = TILE_DIM,
):
    """The rotary tile of a block of rows, rotated back: `[BLOCK_M, 64]` fp32."""
    dim_offs = tl.arange(0, TILE_DIM)[None, :]  # [1, 64]
    positions = tl.load(positions_ptr + tokens).to(tl.int64)[:, None]  # [BLOCK_M, 1]
    # [BLOCK_M, 64] each
    cos, sin = load_rotation(
        cos_sin_ptr,
        cos_sin_stride,
        positions,
        max_position,
        dim_offs // 2,
        True,
        TILE_DIM // 2,
    )
    other_offs = tl.broadcast_to(dim_offs ^ 1, [BLOCK_M, TILE_DIM])  # [BLOCK_M, 64]
    others = tl.gather(x, other_offs, 1)  # [BLOCK_M, 64]
    return x * cos + others * tl.where(dim_offs % 2 == 0, sin, sin * -1.0)


@triton.jit
def _store_fp8_block(
    values_ptr,
    scales_ptr,
    block_offs,  # [BLOCK_M]
    low,  # [BLOCK_M, 64] fp32
    high,  # [BLOCK_M, 64] fp32
    row_mask,  # [BLOCK_M]
    TILE_DIM: tl.constexpr = TILE_DIM,
):
    """Store two tiles of dims, which have one scale for each row, in FP8."""
    amax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)  # [BLOCK_M]
    exponents, inverses = block_scale(amax)  # [BLOCK_M] each
    # [BLOCK_M, 64] each
    low_codes = e4m3_code(low * inverses[:, None]).to(tl.uint8)
    high_codes = e4m3_code(high * inverses[:, None]).to(tl.uint8)
    dim_offs = tl.arange(0, TILE_DIM)[None, :]  # [1, 64]
    value_ptrs = values_ptr + block_offs[:, None] * (2 * TILE_DIM) + dim_offs
    tl.store(value_ptrs, low_codes, mask=row_mask[:, None])
    tl.store(value_ptrs + TILE_DIM, high_codes, mask=row_mask[:, None])
    tl.store(scales_ptr + block_offs, exponent_scale(exponents), mask=row_mask)


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_heads",
        "request_rows",
        "window_row",
        "window",
        "ratio",
        "group_tokens",
        "max_position",
    ],
    do_not_specialize_on_alignment=[
        "starts_ptr",
        "seq_lens_ptr",
        "gather_lens_ptr",
        "positions_ptr",
    ],
)
def _range_prefill_kernel(
    q_ptr,
    kv_ptr,
    starts_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    sink_ptr,
    out_ptr,
    num_requests,
    num_heads,
    request_rows,
    window_row,
    window,
    ratio,
    out_token_stride,
    out_head_stride,
    qk_scale,
    scales_ptr,
    positions_ptr,
    cos_sin_ptr,
    group_tokens,
    max_position,
    cos_sin_stride,
    HAS_SINK: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    TILE_DIM: tl.constexpr = TILE_DIM,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
    MOST_RISE: tl.constexpr = MOST_RISE,
):
    """BLOCK_M rows of the queries of one request, of which a token has `num_heads`."""
    request, begin, end, first_row = _find_tile(
        starts_ptr, num_requests, num_heads, tl.program_id(0), BLOCK_M
    )
    seq_len = tl.load(seq_lens_ptr + request)
    # Where the rows of the window begin.
    window_position = seq_len - tl.load(gather_lens_ptr + request)
    num_rows = (end - begin) * num_heads
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    position = seq_len - (end - begin)
    first_position = position + first_row // num_heads
    last_position = position + last_row // num_heads
    num_compressed = tl.minimum((last_position + 1) // ratio, window_row)
    window_first = tl.maximum(first_position - (window - 1) - window_position, 0)
    window_end = last_position + 1 - window_position
    compressed_tiles = tl.cdiv(num_compressed, BLOCK_N)
    num_tiles = compressed_tiles + tl.cdiv(window_end - window_first, BLOCK_N)
    num_tiles = tl.where(first_row < num_rows, num_tiles, 0)

    row_offs = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    positions = position + row_offs // num_heads  # [BLOCK_M]
    # [BLOCK_M]
    row_compressed = tl.minimum((positions + 1) // ratio, window_row)
    row_window_end = positions + 1 - window_position  # [BLOCK_M]
    # [64, BLOCK_M]
    q_ptrs = tl.make_block_ptr(
        q_ptr + begin.to(tl.int64) * num_heads * HEAD_DIM,
        shape=(HEAD_DIM, num_rows),
        strides=(1, HEAD_DIM),
        offsets=(0, first_row),
        block_shape=(TILE_DIM, BLOCK_M),
        order=(0, 1),
    )
    request_ptr = kv_ptr + request.to(tl.int64) * request_rows * HEAD_DIM
    key_offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]

    row_max = tl.full([BLOCK_M], EMPTY_MAX, tl.float32)  # [BLOCK_M]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # [BLOCK_N, BLOCK_M]
    # [BLOCK_M, 64] each
    acc0 = tl.zeros([BLOCK_M, TILE_DIM], tl.float32)
    acc1 = tl.zeros([BLOCK_M, TILE_DIM], tl.float32)
    acc2 = tl.zeros([BLOCK_M, TILE_DIM], tl.float32)
    acc3 = tl.zeros([BLOCK_M, TILE_DIM], tl.float32)
    acc4 = tl.zeros([BLOCK_M, TILE_DIM], tl.float32)
    acc5 = tl.zeros([BLOCK_M, TILE_DIM], tl.float32)
    acc6 = tl.zeros([BLOCK_M, TILE_DIM], tl.float32)
    acc7 = tl.zeros([BLOCK_M, TILE_DIM], tl.float32)
    for tile in range(0, num_tiles):
        in_window = tile >= compressed_tiles
        start = tl.where(
            in_window,
            window_first + (tile - compressed_tiles) * BLOCK_N,
            tile * BLOCK_N,
        )
        behind = tl.where(in_window, window_end, num_compressed)
        range_ptr = request_ptr + tl.where(in_window, window_row, 0).to(tl.int64) * (
            HEAD_DIM
        )
        # The same rows as keys and as values. [BLOCK_N, 64]
        row_ptrs = tl.make_block_ptr(
            range_ptr,
            shape=(behind, HEAD_DIM),
            strides=(HEAD_DIM, 1),
            offsets=(start, 0),
            block_shape=(BLOCK_N, TILE_DIM),
            order=(1, 0),
        )
        # A loop, and not eight names: triton-xpu 3.3 would move the scores into the
        # operand of the values' product, in fp32, behind each of eight.
        scores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # [BLOCK_N, BLOCK_M]
        for dim in range(0, HEAD_DIM, TILE_DIM):
            k = tl.load(
                tl.advance(row_ptrs, (0, dim)),
                boundary_check=(0,),
                padding_option="zero",
            )  # [BLOCK_N, 64]
            q = tl.load(
                tl.advance(q_ptrs, (dim, 0)),
                boundary_check=(1,),
                padding_option="zero",
            )  # [64, BLOCK_M]
            scores = tl.dot(k, q, scores)
        # [BLOCK_M] each
        row_end = tl.where(in_window, row_window_end, row_compressed)
        row_first = tl.where(in_window, row_window_end - window, 0)
        keys = (start + key_offs)[:, None]  # [BLOCK_N, 1]
        # [BLOCK_N, BLOCK_M]
        key_mask = (keys >= row_first[None, :]) & (keys < row_end[None, :])
        logits = tl.where(key_mask, scores * qk_scale, float("-inf"))
        rise_mask = logits > row_max[None, :] + MOST_RISE  # [BLOCK_N, BLOCK_M]
        if tl.max(tl.max(rise_mask.to(tl.int32), 0), 0) > 0:
            new_max = tl.maximum(row_max, tl.max(logits, 0))  # [BLOCK_M]
            rescale = tl.exp2(row_max - new_max)  # [BLOCK_M]
            row_max = new_max
            sums *= rescale[None, :]
            row_rescale = rescale[:, None]  # [BLOCK_M, 1]
            acc0 *= row_rescale
            acc1 *= row_rescale
            acc2 *= row_rescale
            acc3 *= row_rescale
            acc4 *= row_rescale
            acc5 *= row_rescale
            acc6 *= row_rescale
            acc7 *= row_rescale
        weights = tl.exp2(logits - row_max[None, :])  # [BLOCK_N, BLOCK_M]
        sums += weights
        p = tl.trans(weights.to(tl.bfloat16))  # [BLOCK_M, BLOCK_N]
        acc0 = _add_values(acc0, p, row_ptrs, tile, num_tiles, 0)
        acc1 = _add_values(acc1, p, row_ptrs, tile, num_tiles, 1)
        acc2 = _add_values(acc2, p, row_ptrs, tile, num_tiles, 2)
        acc3 = _add_values(acc3, p, row_ptrs, tile, num_tiles, 3)
        acc4 = _add_values(acc4, p, row_ptrs, tile, num_tiles, 4)
        acc5 = _add_values(acc5, p, row_ptrs, tile, num_tiles, 5)
        acc6 = _add_values(acc6, p, row_ptrs, tile, num_tiles, 6)
        acc7 = _add_values(acc7, p, row_ptrs, tile, num_tiles, 7)

    # [BLOCK_M] each
    out_rows = first_row + tl.arange(BLOCK_M, 2 * BLOCK_M) - BLOCK_M
    row_mask = out_rows < num_rows
    heads = out_rows % num_heads
    tokens = (begin + out_rows // num_heads).to(tl.int64)
    factor = softmax_factor(row_max, tl.sum(sums, 0), sink_ptr, heads, None, HAS_SINK)
    factor = factor[:, None]  # [BLOCK_M, 1]
    if HEADS_PER_GROUP:
        # [BLOCK_M]
        block_offs = first_blocks(heads, tokens, group_tokens, HEADS_PER_GROUP)
        _store_fp8_block(
            out_ptr,
            scales_ptr,
            block_offs,
            _rounded(acc0, factor),
            _rounded(acc1, factor),
            row_mask,
        )
        _store_fp8_block(
            out_ptr,
            scales_ptr,
            block_offs + 1,
            _rounded(acc2, factor),
            _rounded(acc3, factor),
            row_mask,
        )
        _store_fp8_block(
            out_ptr,
            scales_ptr,
            block_offs + 2,
            _rounded(acc4, factor),
            _rounded(acc5, factor),
            row_mask,
        )
        # Rows without a query take the first token's position.
        rope = _rotate_tile_back(
            _rounded(acc7, factor),
            tl.where(row_mask, tokens, 0),
            positions_ptr,
            cos_sin_ptr,
            max_position,
            cos_sin_stride,
            BLOCK_M,
        )
        _store_fp8_block(
            out_ptr,
            scales_ptr,
            block_offs + 3,
            _rounded(acc6, factor),
            rope,
            row_mask,
        )
    else:
        row_mask = row_mask[:, None]  # [BLOCK_M, 1]
        out_offs = tokens * out_token_stride + heads * out_head_stride  # [BLOCK_M]
        # [BLOCK_M, 64]
        out_ptrs = out_ptr + out_offs[:, None] + tl.arange(0, TILE_DIM)[None, :]
        _store_tile(out_ptrs + 0 * TILE_DIM, acc0, factor, row_mask)
        _store_tile(out_ptrs + 1 * TILE_DIM, acc1, factor, row_mask)
        _store_tile(out_ptrs + 2 * TILE_DIM, acc2, factor, row_mask)
        _store_tile(out_ptrs + 3 * TILE_DIM, acc3, factor, row_mask)
        _store_tile(out_ptrs + 4 * TILE_DIM, acc4, factor, row_mask)
        _store_tile(out_ptrs + 5 * TILE_DIM, acc5, factor, row_mask)
        _store_tile(out_ptrs + 6 * TILE_DIM, acc6, factor, row_mask)
        _store_tile(out_ptrs + 7 * TILE_DIM, acc7, factor, row_mask)
