# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weights of routed experts as a sub-group of an Intel GPU takes them.

A column of the product is a row of a checkpoint's weight. Sixteen columns times 32
values along K are a tile: lane `n` of a sub-group holds the bytes of column `n`, which
is the right operand of the matrix instruction as it is, so nothing goes through shared
local memory. In memory a tile is contiguous, and the tiles of a group of 16 columns
follow each other along K: `[E, N / 16, K / 32, 16, bytes]`, scales accordingly. A
checkpoint has `[E, N, K / 32, bytes]`: only the two axes between are exchanged, so both
have the same bytes and no column is padded.
"""

from ._fp4 import MXFP4_BLOCK, mxfp4_nibble, mxfp4_nibble_pair
from ._triton import tl, triton
from ._ue8m0 import MANTISSA_BITS

LANES = 16
"""Columns of a tile: lanes of a sub-group, and columns of a matrix instruction."""
TILE_K = MXFP4_BLOCK
"""Values of a column in a tile, all under one scale."""
TILE_BYTES = TILE_K // 2
"""Bytes of a column in a tile."""
WORDS = 4
"""Words of eight codes that a lane holds of a tile."""


@triton.jit
def tile_scale(exponent, MANTISSA_BITS: tl.constexpr = MANTISSA_BITS):
    """2^(exponent - 127) in fp32 of an UE8M0 byte as int32. Element-wise.

    For exponent 0 it is a subnormal number, for 255 infinity: `not_a_number` makes NaN
    of its column.
    """
    SUBNORMAL: tl.constexpr = 0x00400000  # 2^-127
    bits = tl.maximum(exponent << MANTISSA_BITS, SUBNORMAL)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def not_a_number(scale):
    """NaN where `tile_scale` gave infinity, else 0. Element-wise."""
    return scale - scale


@triton.jit
def _pair(words, scales, PAIRED: tl.constexpr, PLACE: tl.constexpr):
    """Nibbles PLACE and PLACE + 4, or times `scales`, one more axis of 2 behind."""
    if PAIRED:
        return mxfp4_nibble_pair(words, PLACE)
    low = mxfp4_nibble(words, scales, PLACE)
    return tl.join(low, mxfp4_nibble(words, scales, PLACE + 4))


@triton.jit
def tile_values(
    words,  # [LANES, WARPS, GROUPS, WORDS] int32
    scales,  # 1.0, or [LANES, WARPS, GROUPS, 1]; unused if PAIRED
    PAIRED: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr = LANES,
):
    """The values of tiles times `scales`, `[WARPS, 32, GROUPS * LANES]` bf16, the even
    ones first, in the order of `value_word`: the right operand of a product."""
    even = tl.join(_pair(words, scales, PAIRED, 0), _pair(words, scales, PAIRED, 2))
    odd = tl.join(_pair(words, scales, PAIRED, 1), _pair(words, scales, PAIRED, 3))
    values = tl.join(even, odd)
    # [LANES, WARPS, GROUPS, WORDS, 2, 2, 2]
    values = tl.permute(values, (1, 6, 3, 5, 4, 2, 0))
    return tl.reshape(values, (WARPS, 2 * LANES, GROUPS * LANES))


@triton.jit
def value_word(lanes):
    """Which two values of a block, as a word of a row, `tile_values` has at `lanes`."""
    return (lanes & 12) | ((lanes & 1) << 1) | ((lanes & 2) >> 1)
