# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Values of the codes in words of routed experts' weights.

All functions are element-wise and exact without a scale. Names of formats are those of
`_experts_formats`.
"""

from .._fp4 import mxfp4_nibble, mxfp4_nibble_pair
from .._fp8 import E4M3_SHIFT
from .._triton import tl, triton


@triton.jit
def e4m3_byte(words, scale, PLACE: tl.constexpr, SHIFT: tl.constexpr = E4M3_SHIFT):
    """The bf16 value of byte PLACE of int32 words, the lowest first, times `scale`.

    The code's sign goes to bit 31 and its seven other bits to bits 26..20: a float of
    2^-120 times the value, also for subnormal codes. The code of NaN gives 480.
    """
    SIGN_AND_CODE: tl.constexpr = -0x78100000
    bits = ((words << (24 - 8 * PLACE)) >> 4) & SIGN_AND_CODE
    return (bits.to(tl.float32, bitcast=True) * 2.0**SHIFT * scale).to(tl.bfloat16)


@triton.jit
def e4m3_byte_pair(words, PLACE: tl.constexpr, SHIFT: tl.constexpr = E4M3_SHIFT):
    """The bf16 values of bytes PLACE and PLACE + 2 of int32 words, one more axis of 2
    behind. PLACE is 0 or 1.

    Both go to bits 15 and 10..4 of the halves of a word in the same instructions.
    """
    SIGNS: tl.constexpr = -0x7FFF8000
    MAGNITUDES: tl.constexpr = 0x07F007F0
    signs = words << (8 - 8 * PLACE)
    magnitudes = words << 4 if PLACE == 0 else words >> 4
    bits = (signs & SIGNS) | (magnitudes & MAGNITUDES)
    low = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    unit = tl.full([], 2.0**SHIFT, tl.float32).to(tl.bfloat16)
    return tl.join(low * unit, high * unit)


@triton.jit
def int4_nibble(words, scale, PLACE: tl.constexpr):
    """The bf16 value of nibble PLACE of int32 words, the lowest first, less 8, times
    `scale`: the nibble counts units of a float of 2^23."""
    UNITS: tl.constexpr = 0x4B000000
    ZERO: tl.constexpr = 2.0**23 + 8
    bits = ((words >> (4 * PLACE)) & 15) | UNITS
    return ((bits.to(tl.float32, bitcast=True) - ZERO) * scale).to(tl.bfloat16)


@triton.jit
def int4_nibble_pair(words, PLACE: tl.constexpr):
    """The bf16 values of nibbles PLACE and PLACE + 4 of int32 words, less 8, one more
    axis of 2 behind. PLACE is 0 to 3.

    Both count units of a bf16 of 128 in the halves of a word, in the same instructions.
    """
    NIBBLES: tl.constexpr = 0x000F000F
    UNITS: tl.constexpr = 0x43004300
    bits = ((words >> (4 * PLACE)) & NIBBLES) | UNITS
    low = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    zero = tl.full([], 128.0 + 8.0, tl.float32).to(tl.bfloat16)
    return tl.join(low - zero, high - zero)


@triton.jit
def _code(words, scale, FORMAT: tl.constexpr, PLACE: tl.constexpr):
    """The bf16 value of code PLACE of a word, times `scale`."""
    if FORMAT == "fp8":
        return e4m3_byte(words, scale, PLACE)
    if FORMAT == "int4":
        return int4_nibble(words, scale, PLACE)
    return mxfp4_nibble(words, scale, PLACE)


@triton.jit
def code_pair(
    words, scales, FORMAT: tl.constexpr, PAIRED: tl.constexpr, PLACE: tl.constexpr
):
    """The values of code PLACE of a word and of the one 16 bits above, one more axis of
    2 behind; times `scales` unless PAIRED."""
    if PAIRED:
        if FORMAT == "fp8":
            return e4m3_byte_pair(words, PLACE)
        if FORMAT == "int4":
            return int4_nibble_pair(words, PLACE)
        return mxfp4_nibble_pair(words, PLACE)
    ABOVE: tl.constexpr = 2 if FORMAT == "fp8" else 4
    low = _code(words, scales, FORMAT, PLACE)
    return tl.join(low, _code(words, scales, FORMAT, PLACE + ABOVE))
