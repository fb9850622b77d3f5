# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weights of routed experts as a sub-group of an Intel GPU takes them.

A column of the product is a row of a checkpoint's weight. Sixteen columns times 32
values along K are a tile: lane `n` of a sub-group holds the bytes of column `n`, which
is the right operand of the matrix instruction as it is, so nothing goes through shared
local memory. In memory a tile is contiguous, and the tiles of a group of 16 columns
follow each other along K: `[E, N / 16, K / 32, 16, bytes]`, scales of single columns
accordingly. A checkpoint has `[E, N, K / 32, bytes]`: only the two axes between are
exchanged, so both have the same bytes and no column is padded. The 32 bytes of FP8 have
the even values first besides: a step of the matrix instruction takes one half.
"""

from .._fp4 import MXFP4_BLOCK
from .._triton import tl, triton
from .._ue8m0 import MANTISSA_BITS
from ._experts_codes import code_pair

LANES = 16
"""Columns of a tile: lanes of a sub-group, and columns of a matrix instruction."""
TILE_K = MXFP4_BLOCK
"""Values of a column in a tile, all under one scale."""


WORDS = 4
"""Words of codes that a lane loads at a time: a tile of 4 bits, or half of one."""


@triton.jit
def tile_scale(
    stored, FORMAT: tl.constexpr, MANTISSA_BITS: tl.constexpr = MANTISSA_BITS
):
    """A scale in fp32 as it multiplies values. Element-wise.

    That of MXFP4 is 2^(stored - 127): for 0 a subnormal number, for 255 infinity, where
    `not_a_number` makes NaN of its column.
    """
    if FORMAT != "mxfp4":
        return stored.to(tl.float32)
    SUBNORMAL: tl.constexpr = 0x00400000  # 2^-127
    bits = tl.maximum(stored.to(tl.int32) << MANTISSA_BITS, SUBNORMAL)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def not_a_number(scale):
    """NaN where `tile_scale` gave infinity, else 0. Element-wise."""
    return scale - scale


@triton.jit
def tile_values(
    words,  # [LANES, WARPS, GROUPS, WORDS] int32; of FP8 one more axis of 2 behind
    scales,  # 1.0, or of one value for the words of a lane; unused if PAIRED
    FORMAT: tl.constexpr,
    PAIRED: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr = LANES,
):
    """The values of tiles times `scales`, `[WARPS, 32, GROUPS * LANES]` bf16, the even
    ones first, in the order of `value_word`: the right operand of a product."""
    even = code_pair(words, scales, FORMAT, PAIRED, 0)
    odd = code_pair(words, scales, FORMAT, PAIRED, 1)
    if FORMAT == "fp8":
        values = tl.join(even, odd)  # [LANES, WARPS, GROUPS, WORDS, 2, 2, 2]
        values = tl.permute(values, (1, 4, 3, 6, 5, 2, 0))
    else:
        even = tl.join(even, code_pair(words, scales, FORMAT, PAIRED, 2))
        odd = tl.join(odd, code_pair(words, scales, FORMAT, PAIRED, 3))
        values = tl.join(even, odd)  # [LANES, WARPS, GROUPS, WORDS, 2, 2, 2]
        values = tl.permute(values, (1, 6, 3, 5, 4, 2, 0))
    return tl.reshape(values, (WARPS, 2 * LANES, GROUPS * LANES))


@triton.jit
def value_word(lanes):
    """Which two values of a block, as a word of a row, `tile_values` has at `lanes`."""
    return (lanes & 12) | ((lanes & 1) << 1) | ((lanes & 2) >> 1)
