# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store-side quantization: power-of-two block scales, e4m3 and e2m1 codes.

Everything works on the bits of an fp32 value. That is exact, also at 448 * 2^k where
`ceil(log2(amax / 448))` is one unit in the last place away from the next exponent,
and it asks nothing of a back end's FP8 casts, which differ in rounding and range.
"""

from ._triton import tl, triton


@triton.jit
def e4m3_exponent(amax):
    """ceil(log2(amax / 448)) + 127 as int32, for positive normal fp32 `amax`."""
    # 448 = 1.75 * 2^8: a mantissa above 1.75 (0x600000) carries into the exponent.
    bits = amax.to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) >> 23) - 8


@triton.jit
def e2m1_exponent(amax):
    """ceil(log2(amax / 6)) + 127 as int32, for fp32 `amax` of at least 6 * 2^-126."""
    # 6 = 1.5 * 2^2
    bits = amax.to(tl.int32, bitcast=True)
    return ((bits + 0x3FFFFF) >> 23) - 2


@triton.jit
def exponent_scale(exponent):
    """2^(exponent - 127) in fp32, for a biased exponent in [1, 254]."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_inverse(exponent):
    """2^(127 - exponent) in fp32, for a biased exponent in [0, 253]."""
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """The e4m3fn byte of fp32 `x` as int32: nearest, ties to even, saturating at 448.

    NaN becomes the NaN code.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 0x43E00000 = 448, 0x3C800000 = 2^-6, the smallest normal e4m3 value
    clamped = tl.minimum(magnitude, 0x43E00000)
    rounded = (clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Adding 2^14 leaves multiples of 2^-9, the subnormal step, in the low bits.
    shifted = clamped.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(clamped < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def e2m1_code(x):
    """The e2m1 nibble of fp32 `x` as int32: nearest, ties to even, saturating at 6."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32)
    code += (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 0x8)
