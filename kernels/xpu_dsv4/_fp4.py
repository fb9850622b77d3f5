# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Values of e2m1 codes, and of MXFP4 blocks: 32 codes under one UE8M0 exponent.

All functions are element-wise. Source: OCP Microscaling Formats (MX), version 1.0.
"""

from ._triton import tl, triton
from ._ue8m0 import MANTISSA_BITS, exponent_scale

MXFP4_BLOCK = 32
"""Values that share a UE8M0 scale."""
SCALES_A_WORD = 4


@triton.jit
def e2m1_value(code, MANTISSA_BITS: tl.constexpr = MANTISSA_BITS):
    """The fp32 value of an e2m1 code, int32 from 0 to 15."""
    MAGNITUDE: tl.constexpr = 7
    SIGN: tl.constexpr = 8
    BIAS_DIFFERENCE: tl.constexpr = 127 - 1
    magnitude = code & MAGNITUDE
    # Codes from 2 on are normal: two bits of exponent, then one of mantissa.
    bits = (magnitude + (BIAS_DIFFERENCE << 1)) << (MANTISSA_BITS - 1)
    normal = bits.to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where((code & SIGN) != 0, -value, value)


@triton.jit
def mxfp4_pair(codes, exponent):
    """The two bf16 values of a byte, low nibble first, times 2^(exponent - 127). Exact.

    `codes` is uint8. A nibble's sign goes to bit 31 and its three other bits to bits
    24..22: a float of 2^-126 times the value, also for the subnormal code. Exponent 0
    gives 0. Exponent 255, which is NaN, gives infinity.
    """
    SIGN_AND_CODE: tl.constexpr = -0x7E400000
    SHIFT: tl.constexpr = 126
    scale = exponent_scale(exponent)
    bits = codes.to(tl.int8, bitcast=True).to(tl.int32)
    low = ((bits << 28) >> 6) & SIGN_AND_CODE
    high = (bits << 18) & SIGN_AND_CODE
    low = low.to(tl.float32, bitcast=True) * 2.0**SHIFT * scale
    high = high.to(tl.float32, bitcast=True) * 2.0**SHIFT * scale
    return low.to(tl.bfloat16), high.to(tl.bfloat16)


@triton.jit
def mxfp4_nibble(words, scale, PLACE: tl.constexpr):
    """The bf16 value of nibble PLACE of int32 words, the lowest first, times `scale`.

    Exact, by the steps of `mxfp4_pair`.
    """
    SIGN_AND_CODE: tl.constexpr = -0x7E400000
    SHIFT: tl.constexpr = 126
    bits = ((words << (28 - 4 * PLACE)) >> 6) & SIGN_AND_CODE
    return (bits.to(tl.float32, bitcast=True) * 2.0**SHIFT * scale).to(tl.bfloat16)


@triton.jit
def mxfp4_nibble_pair(words, PLACE: tl.constexpr):
    """The bf16 values of nibbles PLACE and PLACE + 4 of int32 words, one more axis of 2
    behind. PLACE is 0 to 3. Exact.

    Both go to bits 15 and 8..6 of the halves of a word in the same instructions: a bf16
    of 2^-126 times the value, also for the subnormal code.
    """
    SIGNS: tl.constexpr = -0x7FFF8000
    MAGNITUDES: tl.constexpr = 0x01C001C0
    SHIFT: tl.constexpr = 126
    signs = words << (12 - 4 * PLACE)
    magnitudes = words << (6 - 4 * PLACE) if PLACE < 2 else words >> (4 * PLACE - 6)
    bits = (signs & SIGNS) | (magnitudes & MAGNITUDES)
    low = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    unit = tl.full([], 2.0**SHIFT, tl.float32).to(tl.bfloat16)
    return tl.join(low * unit, high * unit)
