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

from ._fp4 import MXFP4_BLOCK, mxfp4_nibble
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
    """2^(exponent - 127) in fp32 of an UE8M0 byte as int32; NaN for 255. Element-wise.

    For exponent 0 it is a subnormal number.
    """
    # The highest bit of the mantissa: of 2^-127, and of a NaN.
    HIGHEST: tl.constexpr = 0x00400000
    is_end = ((exponent + 1) & 0xFF) < 2
    bits = (exponent << MANTISSA_BITS) | tl.where(is_end, HIGHEST, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _part_values(
    words,  # [LANES, WARPS, GROUPS, WORDS] int32
    scales,  # 1.0, or [LANES, WARPS, GROUPS, 1]
    PART: tl.constexpr,
):
    """The even (PART 0) or odd values of tiles, two more axes of 2 behind, bf16."""
    v0 = mxfp4_nibble(words, scales, PART)  # [LANES, WARPS, GROUPS, WORDS] each
    v1 = mxfp4_nibble(words, scales, 2 + PART)
    v2 = mxfp4_nibble(words, scales, 4 + PART)
    v3 = mxfp4_nibble(words, scales, 6 + PART)
    return tl.join(tl.join(v0, v2), tl.join(v1, v3))


@triton.jit
def tile_values(
    words,  # [LANES, WARPS, GROUPS, WORDS] int32
    scales,  # 1.0, or [LANES, WARPS, GROUPS, 1]
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr = LANES,
):
    """The values of tiles times `scales`, `[WARPS, 32, GROUPS * LANES]` bf16, the
    even ones first: the right operand of a product."""
    # [LANES, WARPS, GROUPS, WORDS, 2, 2, 2]
    values = tl.join(_part_values(words, scales, 0), _part_values(words, scales, 1))
    values = tl.permute(values, (1, 6, 3, 4, 5, 2, 0))
    return tl.reshape(values, (WARPS, 2 * LANES, GROUPS * LANES))
