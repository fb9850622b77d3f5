# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parts of sparse prefill for a few heads on Intel GPUs, whose lanes share the dims of
a key: row numbers, keys, values, and what follows the loop over keys.
"""

from .._pages import HEAD_DIM, NOPE_DIM
from .._pairs import round_to_bf16
from .._softmax import EMPTY_MAX, LOG2E
from .._triton import tl, triton
from .._ue8m0 import e4m3_code, exponent_scale
from ._dims_first import range_behind_loop
from ._output import QUANT_GROUP, block_scale, first_blocks, rotate_back

LANES = 16
"""Lanes of a sub-group, and columns of a matrix instruction."""
WARPS = 8
"""Sub-groups, each of which owns 64 dims."""
LANE_WORDS = 2
"""Words of two dims each that a lane loads of a key."""
TILE_N = 16
"""Keys of one product."""
SCAN = 256
"""Indices that are looked through at a time for a row that exists."""
FARTHEST = 64.0
"""How far from 0 the largest score of a head may lie, in powers of 2, if no maximum is
taken off."""


@triton.jit
def find_row(
    index_ptrs,
    num_keys,
    num_rows,
    SCAN: tl.constexpr = SCAN,
):
    """A row of a key that counts, or -1 if none does."""
    scan_offs = tl.arange(0, SCAN)  # [SCAN]
    found = tl.full([SCAN], -1, tl.int32)  # [SCAN]
    for start in range(0, num_keys, SCAN):
        offs = start + scan_offs  # [SCAN]
        rows = tl.load(index_ptrs + offs, mask=offs < num_keys, other=-1)  # [SCAN]
        counts = (rows >= 0) & (rows < num_rows)
        found = tl.maximum(found, tl.where(counts, rows, -1).to(tl.int32))
    return tl.max(found, 0)


@triton.jit
def load_rows(
    index_ptrs,
    start,
    num_keys,
    num_rows,
    TILE_N: tl.constexpr = TILE_N,
):
    """Row numbers of a tile of keys, `[TILE_N]` int32, or -1 if they do not count."""
    offs = start + tl.arange(0, TILE_N)  # [TILE_N]
    rows = tl.load(index_ptrs + tl.minimum(offs, num_keys - 1))
    counts = (rows >= 0) & (rows < num_rows) & (offs < num_keys)
    return tl.where(counts, rows, -1).to(tl.int32)


@triton.jit
def load_keys(
    rows,  # [TILE_N]
    lane_ptrs,  # [LANES, WARPS, 1, 2]
    some_row,
    TILE_N: tl.constexpr = TILE_N,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
):
    """A tile of keys, `[LANES, WARPS, TILE_N, 2, 2]` bf16, and which of them count.

    `some_row`, which counts, stands for those that do not: then no load needs a mask,
    which is a branch for each, and no value that is not the token's own is read. A scan
    along an axis of one element hands row numbers from lane to lane; else triton-xpu
    3.3 has each lane load and compare those of all its keys.
    """
    counts = rows >= 0
    rows = tl.where(counts, rows, some_row)
    rows = tl.reshape(tl.cumsum(rows[:, None], 1), (TILE_N,))
    row_offs = rows.to(tl.int64) * (HEAD_DIM // 2)  # [TILE_N]
    words = tl.load(lane_ptrs + row_offs[None, None, :, None])
    even = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    odd = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(even, odd), counts


@triton.jit
def add_values(
    acc,  # [BLOCK_H, 512] fp32
    weights,  # [BLOCK_H, TILE_N] fp32
    k,  # [LANES, WARPS, TILE_N, 2, 2] bf16
    taken,
    TILE_N: tl.constexpr = TILE_N,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
):
    """`acc` plus the weighed values, their dims in the order (2, WARPS, 2, LANES)."""
    if taken:
        v = tl.permute(k, (2, 3, 1, 4, 0))  # [TILE_N, 2, WARPS, 2, LANES]
        v = tl.reshape(v, (TILE_N, HEAD_DIM))
        acc = tl.dot(weights.to(tl.bfloat16), v, acc)
    return acc


@triton.jit
def sink_factor(
    row_max,  # [BLOCK_H] fp32
    row_sum,  # [BLOCK_H] fp32
    sink_ptr,
    head_offs,  # [BLOCK_H]
    head_mask,  # [BLOCK_H]
    HAS_SINK: tl.constexpr,
    LOG2E: tl.constexpr = LOG2E,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
):
    """1 / (row_sum + the sink's share), or 0 for a row without keys.

    As `softmax_factor`; but here a maximum may lie far below a sink, and a share of
    2^sink would be infinite. So sum and share are divided by the share where it is
    more than 1.
    """
    has_keys = row_sum != 0.0
    total = row_sum
    shrunk = 1.0
    if HAS_SINK:
        sink = tl.load(sink_ptr + head_offs, mask=head_mask, other=float("-inf"))
        sink = sink.to(tl.float32) * LOG2E - row_max
        sink = tl.where(sink > -EMPTY_MAX, -EMPTY_MAX, sink)
        above = tl.where(sink > 0.0, sink, 0.0)
        shrunk = tl.exp2(-above)
        total = row_sum * shrunk + tl.exp2(sink - above)
    return tl.where(has_keys, shrunk / tl.where(has_keys, total, 1.0), 0.0)


@triton.jit
def store_fp8(
    x,  # [BLOCK_H, 128, 2, 2] fp32
    head_offs,  # [BLOCK_H]
    head_mask,  # [BLOCK_H]
    token,
    zero,
    out_ptr,
    scales_ptr,
    positions_ptr,
    cos_sin_ptr,
    group_tokens,
    max_position,
    cos_sin_stride,
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    NOPE_PAIRS: tl.constexpr = NOPE_DIM // 2,
    QUANT_GROUP: tl.constexpr = QUANT_GROUP,
):
    """Store all dims of a block of heads in FP8, as `store_heads` does.

    A lane has two pairs of each head: it rotates and stores what it has.
    """
    HEAD_LANES: tl.constexpr = HEAD_DIM // 4
    BLOCKS: tl.constexpr = HEAD_DIM // QUANT_GROUP
    BLOCK_LANES: tl.constexpr = HEAD_LANES // BLOCKS
    even, odd = tl.split(round_to_bf16(x))  # [BLOCK_H, 128, 2] each
    lane_offs = zero + range_behind_loop(HEAD_LANES)[None, :, None]  # [1, 128, 1]
    pair_offs = lane_offs * 2 + tl.arange(0, 2)[None, None, :]  # [1, 128, 2]
    even, odd = rotate_back(
        even,
        odd,
        pair_offs - NOPE_PAIRS,
        pair_offs >= NOPE_PAIRS,
        token,
        positions_ptr,
        cos_sin_ptr,
        max_position,
        cos_sin_stride,
    )
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 2)  # [BLOCK_H, 128]
    amax = tl.max(tl.reshape(amax, (BLOCK_H, BLOCKS, BLOCK_LANES)), 2)
    amax = tl.broadcast_to(amax[:, :, None], (BLOCK_H, BLOCKS, BLOCK_LANES))
    amax = tl.reshape(amax, (BLOCK_H, HEAD_LANES))[:, :, None]  # [BLOCK_H, 128, 1]
    exponents, inverses = block_scale(amax)  # [BLOCK_H, 128, 1] each
    # [BLOCK_H, 128, 2]
    codes = e4m3_code(even * inverses) | (e4m3_code(odd * inverses) << 8)
    # [BLOCK_H, 1, 1]
    block_offs = first_blocks(head_offs, token, group_tokens, HEADS_PER_GROUP)
    block_offs = block_offs[:, None, None]
    row_mask = head_mask[:, None, None]  # [BLOCK_H, 1, 1]
    code_ptrs = out_ptr.to(tl.pointer_type(tl.int16)) + block_offs * (QUANT_GROUP // 2)
    tl.store(code_ptrs + pair_offs, codes.to(tl.int16), mask=row_mask)
    tl.store(
        scales_ptr + block_offs + lane_offs // BLOCK_LANES,
        exponent_scale(exponents),
        mask=row_mask & (lane_offs % BLOCK_LANES == 0),
    )
