# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Products of routed experts: a tile of pairs of one expert times its weights.

A pair is a token and one of its experts, `token * topk + place`. Rows of a tile that no
pair has read those of its first pair, and are not stored: a load with a mask is a
branch, and a row's values reach no other row.
"""

from .._triton import tl, triton
from ._experts_weights import (
    LANES,
    TILE_K,
    WORDS,
    not_a_number,
    tile_scale,
    tile_values,
    value_word,
)

MANY_ROWS = 32
"""From as many rows in a tile on, scales multiply values."""


@triton.jit
def _load(
    x_ptr,
    rows,  # [BLOCK_M]
    x_stride,
    weight_ptr,
    first_tiles,  # [LANES, WARPS, GROUPS]
    blocks,  # [1, WARPS, 1]
    lane_offs,  # [LANES, 1, 1]
    num_blocks,
    HALVES: tl.constexpr,
    LANES: tl.constexpr = LANES,
    WORDS: tl.constexpr = WORDS,
):
    """Of a block along K: two values of each row in a word, `[LANES, WARPS, BLOCK_M]`,
    and the tiles' words, `[LANES, WARPS, GROUPS, WORDS]`, of two HALVES `[..., 2]`. A
    block behind the last is the last."""
    blocks = tl.minimum(blocks, num_blocks - 1)
    x_row_ptrs = x_ptr + (rows * x_stride)[None, None, :]
    x_words = tl.load(x_row_ptrs + (blocks * LANES + value_word(lane_offs)))
    lane_tiles = first_tiles + blocks * LANES
    word_offs = tl.arange(0, WORDS)[None, None, None, :]
    word_offs = lane_tiles[:, :, :, None] * (HALVES * WORDS) + word_offs
    words = tl.load(weight_ptr + word_offs)
    if HALVES == 2:
        # A lane would be given one half of each of two columns by a load of both.
        words = tl.join(words, tl.load(weight_ptr + (word_offs + WORDS)))
    return x_words, words


@triton.jit
def _load_scales(
    scale_ptr,
    first_scales,  # [LANES, WARPS, GROUPS]
    blocks,  # [1, WARPS, 1]
    num_blocks,
    WIDENED: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
):
    """The tiles' scales, `[LANES, WARPS, GROUPS]`, as they are stored, which spills
    less, or exponents as int32 if WIDENED. A block behind the last is the last."""
    blocks = tl.minimum(blocks, num_blocks - 1) >> BLOCK_SHIFT
    scales = tl.load(scale_ptr + (first_scales + blocks * SCALE_LANES))
    return scales.to(tl.int32) if WIDENED else scales


@triton.jit
def _load_contiguous(
    x_ptr,
    rows,  # [BLOCK_M]
    x_stride,
    weight_ptr,
    groups,  # [1, WARPS, GROUPS]
    blocks,  # [1, WARPS, 1]
    num_blocks,
    HALVES: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LANES: tl.constexpr = LANES,
    WORDS: tl.constexpr = WORDS,
):
    """What `_load` gives, in the order of memory: for a compiler that loads ahead."""
    blocks = tl.reshape(tl.minimum(blocks, num_blocks - 1), (WARPS, 1, 1))
    x_row_ptrs = x_ptr + (rows * x_stride)[None, :, None]
    x_offs = blocks * LANES + tl.arange(0, LANES)[None, None, :]
    x_words = tl.reshape(tl.load(x_row_ptrs + x_offs), (WARPS, BLOCK_M, 4, 2, 2))
    # The order of `value_word`.
    x_words = tl.reshape(tl.permute(x_words, (2, 4, 3, 0, 1)), (LANES, WARPS, BLOCK_M))
    tiles = tl.reshape(groups, (WARPS, GROUPS, 1)) * num_blocks + blocks
    TILE: tl.constexpr = LANES * HALVES * WORDS
    words = tl.load(weight_ptr + (tiles * TILE + tl.arange(0, TILE)[None, None, :]))
    if HALVES == 2:
        words = tl.reshape(words, (WARPS, GROUPS, LANES, HALVES, WORDS))
        words = tl.permute(words, (2, 0, 1, 4, 3))
    else:
        words = tl.reshape(words, (WARPS, GROUPS, LANES, WORDS))
        words = tl.permute(words, (2, 0, 1, 3))
    return x_words, words


@triton.jit
def _rows(
    x_words,  # [LANES, WARPS, BLOCK_M] int32
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LANES: tl.constexpr = LANES,
):
    """A block of the rows, `[WARPS, BLOCK_M, 32]` bf16, the even values first: the left
    operand of a product."""
    even = x_words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    odd = (x_words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    x = tl.permute(tl.join(even, odd), (1, 2, 3, 0))  # [WARPS, BLOCK_M, 2, LANES]
    return tl.reshape(x, (WARPS, BLOCK_M, 2 * LANES))


@triton.jit
def _by_column(
    factors,  # [LANES, WARPS, GROUPS]
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr = LANES,
):
    """What a block's columns have, `[WARPS, 1, GROUPS * LANES]`."""
    factors = tl.permute(factors, (1, 2, 0))  # [WARPS, GROUPS, LANES]
    return tl.reshape(factors, (WARPS, GROUPS * LANES))[:, None, :]


@triton.jit
def _products(
    x_ptr,
    rows,  # [BLOCK_M]
    x_stride,
    weight_ptr,
    scale_ptr,
    expert,
    num_groups,
    groups,  # [1, WARPS, GROUPS] int32
    num_blocks,
    EVEN_K: tl.constexpr,
    SCALE_VALUES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP_SHIFT: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    AHEAD: tl.constexpr,
    PAIRED: tl.constexpr,
    WARPS_K: tl.constexpr,
    WARPS_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LANES: tl.constexpr = LANES,
    WORDS: tl.constexpr = WORDS,
):
    """Rows times the groups of 16 columns of each sub-group, `[WARPS_N, BLOCK_M,
    GROUPS, LANES]` fp32, of `num_groups` of an expert. `WARPS_K` sub-groups share the
    blocks along K.

    2^`GROUP_SHIFT` groups times 2^`BLOCK_SHIFT` blocks share a scale; with -1 each
    column has its own. What a block needs is loaded an iteration ahead: scales here,
    the rest here if AHEAD, else by the compiler. A scale multiplies the products of its
    block, or, in tiles of many rows, the values: that takes fewer instructions.
    """
    WARPS: tl.constexpr = WARPS_K * WARPS_N
    HALVES: tl.constexpr = 2 if FORMAT == "fp8" else 1
    SCALE_LANES: tl.constexpr = LANES if GROUP_SHIFT < 0 else 1
    WIDENED: tl.constexpr = FORMAT == "mxfp4" and not AHEAD
    expert_groups = expert.to(tl.int64) * num_groups
    weight_ptr += expert_groups * num_blocks * (LANES * HALVES * WORDS)
    # Shifts: with a division the compiler exchanges scales through registers.
    num_scales = (((num_blocks - 1) >> BLOCK_SHIFT) + 1) * SCALE_LANES
    if GROUP_SHIFT > 0:
        expert_groups = expert.to(tl.int64) * (((num_groups - 1) >> GROUP_SHIFT) + 1)
    scale_ptr += expert_groups * num_scales
    warp_blocks = tl.arange(0, WARPS)[None, :, None] // WARPS_N  # [1, WARPS, 1]
    lane_offs = tl.arange(0, LANES)[:, None, None]
    if AHEAD:
        # Zero, but triton-xpu 3.3 does not know it. It would give a lane what four in a
        # row load, and hand that on through shared local memory.
        lane_offs = lane_offs ^ (num_blocks >> 31)
    # [LANES, WARPS, GROUPS]: an expert has less than 2^31 bytes.
    first_tiles = groups * (num_blocks * LANES) + lane_offs
    # [LANES, WARPS, GROUPS]
    if GROUP_SHIFT < 0:
        first_scales = groups * num_scales + lane_offs
    else:
        # Zero at every lane, without the compiler's knowledge either.
        first_scales = (groups >> GROUP_SHIFT) * num_scales + (lane_offs >> 4)
    stored = _load_scales(
        scale_ptr,
        first_scales,
        warp_blocks,
        num_blocks,
        WIDENED,
        SCALE_LANES,
        BLOCK_SHIFT,
    )
    largest = tl.zeros([LANES, WARPS, GROUPS], tl.int32)
    scales = tile_scale(stored, FORMAT)  # [LANES, WARPS, GROUPS]
    if AHEAD:
        next_x, next_words = _load(
            x_ptr,
            rows,
            x_stride,
            weight_ptr,
            first_tiles,
            warp_blocks,
            lane_offs,
            num_blocks,
            HALVES,
        )
    acc = tl.zeros([WARPS, BLOCK_M, GROUPS * LANES], tl.float32)
    for start in range(0, num_blocks, WARPS_K):
        blocks = start + warp_blocks  # [1, WARPS, 1]
        next_blocks = start + WARPS_K + warp_blocks  # [1, WARPS, 1]
        if AHEAD:
            x_words, words = next_x, next_words
            next_x, next_words = _load(
                x_ptr,
                rows,
                x_stride,
                weight_ptr,
                first_tiles,
                next_blocks,
                lane_offs,
                num_blocks,
                HALVES,
            )
        else:
            x_words, words = _load_contiguous(
                x_ptr,
                rows,
                x_stride,
                weight_ptr,
                groups,
                blocks,
                num_blocks,
                HALVES,
                WARPS,
                GROUPS,
                BLOCK_M,
            )
        if AHEAD:
            scales = tile_scale(stored, FORMAT)
        if FORMAT == "mxfp4":
            largest = tl.maximum(largest, stored.to(tl.int32))
        stored = _load_scales(
            scale_ptr,
            first_scales,
            next_blocks,
            num_blocks,
            WIDENED,
            SCALE_LANES,
            BLOCK_SHIFT,
        )
        if not EVEN_K:
            x_words = tl.where(blocks < num_blocks, x_words, 0)
        x = _rows(x_words, WARPS, BLOCK_M)
        if SCALE_VALUES:
            factors = scales
            if FORMAT == "mxfp4":
                factors += not_a_number(scales)
            factors = factors[:, :, :, None]
            if HALVES == 2:
                factors = factors[:, :, :, :, None]
            values = tile_values(words, factors, FORMAT, False, WARPS, GROUPS)
            acc = tl.dot(x, values, acc)
        else:
            values = tile_values(words, 1.0, FORMAT, PAIRED, WARPS, GROUPS)
            products = tl.dot(x, values)
            factors = _by_column(scales, WARPS, GROUPS)
            acc = tl.fma(products, tl.broadcast_to(factors, products.shape), acc)
        if not AHEAD:
            # A value of the loop stays as it was loaded: no lane makes another's scale.
            scales = tile_scale(stored, FORMAT)
    if FORMAT == "mxfp4" and not SCALE_VALUES:
        largest_scales = tile_scale(largest, FORMAT)
        acc += _by_column(not_a_number(largest_scales), WARPS, GROUPS)
    return tl.sum(tl.reshape(acc, (WARPS_K, WARPS_N, BLOCK_M, GROUPS, LANES)), 0)


@triton.jit(do_not_specialize=["num_blocks", "topk", "limit"])
def _gate_up_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    out_ptr,
    num_blocks,
    num_columns,
    topk,
    limit,
    x_stride,
    FORMAT: tl.constexpr,
    GROUP_SHIFT: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS_K: tl.constexpr,
    WARPS_N: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
    PAIRED: tl.constexpr,
    LANES: tl.constexpr = LANES,
    MANY_ROWS: tl.constexpr = MANY_ROWS,
):
    """SwiGLU of `COLS` groups of 16 columns of each sub-group, for a tile of pairs.

    `x_ptr` and `weight_ptr` point to int32 words.
    """
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        WARPS: tl.constexpr = WARPS_K * WARPS_N
        WIDTH: tl.constexpr = WARPS_N * COLS * LANES
        row_offs = tl.arange(0, BLOCK_M)  # [BLOCK_M]
        pairs = tl.load(tile_pairs_ptr + tile * BLOCK_M + row_offs)  # [BLOCK_M]
        first = tl.load(tile_pairs_ptr + tile * BLOCK_M)
        rows = (tl.where(pairs >= 0, pairs, first) // topk).to(tl.int64)  # [BLOCK_M]
        num_groups = num_columns // LANES
        warp_offs = tl.arange(0, WARPS)[None, :] % WARPS_N
        warp_groups = (tl.program_id(0) * WARPS_N + warp_offs) * COLS
        group_offs = tl.arange(0, 2 * COLS)
        group_offs = group_offs % 2 * num_groups + group_offs // 2
        # [1, WARPS, 2 * COLS]: a group of the gate, then the same of the other half.
        groups = warp_groups[:, :, None] + group_offs[None, None, :]
        products = _products(
            x_ptr,
            rows,
            x_stride,
            weight_ptr,
            scale_ptr,
            expert,
            2 * num_groups,
            groups,
            num_blocks,
            EVEN_K,
            BLOCK_M >= MANY_ROWS,
            FORMAT,
            GROUP_SHIFT,
            BLOCK_SHIFT,
            AHEAD,
            PAIRED,
            WARPS_K,
            WARPS_N,
            2 * COLS,
            BLOCK_M,
        )
        products = tl.reshape(products, (WARPS_N, BLOCK_M, COLS, 2, LANES))
        gate, up = tl.split(tl.permute(products, (1, 0, 2, 4, 3)))
        gate = tl.reshape(gate, (BLOCK_M, WIDTH))
        up = tl.reshape(up, (BLOCK_M, WIDTH))
        if HAS_LIMIT:
            # A comparison with NaN is false, so NaN stays.
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, up)
            up = tl.where(up < -limit, -limit, up)
        values = gate / (1.0 + tl.exp(-gate)) * up
        columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        out_ptr += tile.to(tl.int64) * BLOCK_M * num_columns
        out_ptrs = out_ptr + (row_offs[:, None] * num_columns + columns[None, :])
        tl.store(out_ptrs, values.to(tl.bfloat16))


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    out_ptr,
    num_blocks,
    num_columns,
    FORMAT: tl.constexpr,
    GROUP_SHIFT: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS_K: tl.constexpr,
    WARPS_N: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
    PAIRED: tl.constexpr,
    LANES: tl.constexpr = LANES,
    MANY_ROWS: tl.constexpr = MANY_ROWS,
    TILE_K: tl.constexpr = TILE_K,
):
    """`2 * COLS` groups of 16 columns of each sub-group, for a tile of pairs.

    `x_ptr` and `weight_ptr` point to int32 words.
    """
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        WARPS: tl.constexpr = WARPS_K * WARPS_N
        WIDTH: tl.constexpr = WARPS_N * 2 * COLS * LANES
        pairs = tl.load(tile_pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        x_ptr += tile.to(tl.int64) * BLOCK_M * (num_blocks * (TILE_K // 2))
        warp_offs = tl.arange(0, WARPS)[None, :] % WARPS_N
        warp_groups = (tl.program_id(0) * WARPS_N + warp_offs) * (2 * COLS)
        # [1, WARPS, 2 * COLS]
        groups = warp_groups[:, :, None] + tl.arange(0, 2 * COLS)[None, None, :]
        products = _products(
            x_ptr,
            tl.arange(0, BLOCK_M),
            num_blocks * (TILE_K // 2),
            weight_ptr,
            scale_ptr,
            expert,
            num_columns // LANES,
            groups,
            num_blocks,
            EVEN_K,
            BLOCK_M >= MANY_ROWS,
            FORMAT,
            GROUP_SHIFT,
            BLOCK_SHIFT,
            AHEAD,
            PAIRED,
            WARPS_K,
            WARPS_N,
            2 * COLS,
            BLOCK_M,
        )
        # [BLOCK_M, WARPS_N, 2 * COLS, LANES]
        products = tl.permute(products, (1, 0, 2, 3)).to(tl.bfloat16)
        columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        out_ptrs = (
            out_ptr + pairs.to(tl.int64)[:, None] * num_columns + columns[None, :]
        )
        products = tl.reshape(products, (BLOCK_M, WIDTH))
        tl.store(out_ptrs, products, mask=pairs[:, None] >= 0)
