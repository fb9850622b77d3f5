# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Values of e2m1 codes, and of MXFP4 blocks: 32 codes under one UE8M0 exponent.

Both functions are element-wise. Source: OCP Microscaling Formats (MX), version 1.0.
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
def mxfp4_to_bf16(code, exponent):
    """The bf16 value of an e2m1 code times 2^(exponent - 127), exact.

    Exponent 0 gives 0. Exponent 255, which is NaN, gives infinity.
    """
    return (e2m1_value(code) * exponent_scale(exponent)).to(tl.bfloat16)
