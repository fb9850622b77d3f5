# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantization of fp32 values: power-of-two block scales, e4m3 and e2m1 codes.

All functions are element-wise and work on the bits of an fp32 value. They are exact,
also at 448 * 2^k, where `ceil(log2(amax / 448))` computed in floating point can give
the next exponent, and they need no FP8 cast, whose rounding and range differ between
back ends.
"""

from ._triton import tl, triton

MANTISSA_BITS = 23
"""Bits of the mantissa of an fp32 value."""


@triton.jit
def e4m3_exponent(amax, MANTISSA_BITS: tl.constexpr = MANTISSA_BITS):
    """ceil(log2(amax / 448)) + 127 as int32, for positive normal fp32 `amax`."""
    # 448 = 1.75 * 2^8: a mantissa above 1.75, which is 0x600000, carries.
    CARRY: tl.constexpr = 0x7FFFFF - 0x600000
    bits = amax.to(tl.int32, bitcast=True)
    return ((bits + CARRY) >> MANTISSA_BITS) - 8


@triton.jit
def e2m1_exponent(amax, MANTISSA_BITS: tl.constexpr = MANTISSA_BITS):
    """ceil(log2(amax / 6)) + 127 as int32, for fp32 `amax` of at least 6 * 2^-126."""
    # 6 = 1.5 * 2^2: a mantissa above 1.5, which is 0x400000, carries.
    CARRY: tl.constexpr = 0x7FFFFF - 0x400000
    bits = amax.to(tl.int32, bitcast=True)
    return ((bits + CARRY) >> MANTISSA_BITS) - 2


@triton.jit
def exponent_scale(exponent, MANTISSA_BITS: tl.constexpr = MANTISSA_BITS):
    """2^(exponent - 127) in fp32, for a biased exponent in [1, 254]; 255: infinity."""
    return (exponent << MANTISSA_BITS).to(tl.float32, bitcast=True)


@triton.jit
def any_exponent_scale(exponent, MANTISSA_BITS: tl.constexpr = MANTISSA_BITS):
    """2^(exponent - 127) in fp32, for a biased exponent in [0, 254]; 255: infinity.

    For exponent 0 it is a subnormal number.
    """
    SUBNORMAL: tl.constexpr = 0x00400000  # 2^-127
    bits = tl.where(exponent == 0, SUBNORMAL, exponent << MANTISSA_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exponent_inverse(exponent, MANTISSA_BITS: tl.constexpr = MANTISSA_BITS):
    """2^(127 - exponent) in fp32, for a biased exponent in [0, 253]."""
    return ((254 - exponent) << MANTISSA_BITS).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """The e4m3fn byte of fp32 `x` as int32: nearest, ties to even, saturating at 448.

    NaN becomes the NaN code.
    """
    MAGNITUDE: tl.constexpr = 0x7FFFFFFF
    INFINITY: tl.constexpr = 0x7F800000
    LARGEST: tl.constexpr = 0x43E00000  # 448
    SMALLEST_NORMAL: tl.constexpr = 0x3C800000  # 2^-6
    BIAS_DIFFERENCE: tl.constexpr = 127 - 7
    MANTISSA_BITS_LOST: tl.constexpr = 23 - 3
    HALF_STEP_LESS_ONE: tl.constexpr = 0x7FFFF
    NAN_CODE: tl.constexpr = 0x7F
    SIGN_CODE: tl.constexpr = 0x80
    # Adding 2^14 leaves multiples of 2^-9, the step of subnormals, in the low bits.
    ALIGN: tl.constexpr = 16384.0
    ALIGN_BITS: tl.constexpr = 0x46800000

    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    clamped = tl.minimum(magnitude, LARGEST)
    rounded = (
        clamped + HALF_STEP_LESS_ONE + ((clamped >> MANTISSA_BITS_LOST) & 1)
    ) >> MANTISSA_BITS_LOST
    normal = rounded - (BIAS_DIFFERENCE << 3)
    aligned = clamped.to(tl.float32, bitcast=True) + ALIGN
    subnormal = aligned.to(tl.int32, bitcast=True) - ALIGN_BITS
    code = tl.where(clamped < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(magnitude > INFINITY, NAN_CODE, code)
    return code | ((bits >> 24) & SIGN_CODE)


@triton.jit
def e2m1_code(x):
    """The e2m1 nibble of fp32 `x` as int32: nearest, ties to even, saturating at 6."""
    SIGN_CODE: tl.constexpr = 0x8
    # The midpoints between neighbouring values; at a midpoint the even code wins.
    magnitude = tl.abs(x)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & SIGN_CODE)
