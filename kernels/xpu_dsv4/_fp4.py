# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading e2m1 codes, alone and as MXFP4: under a UE8M0 exponent for each 32."""

from ._triton import tl, triton

MXFP4_BLOCK = 32
SCALES_A_WORD = 4


@triton.jit
def e2m1_value(code):
    """fp32 value of e2m1 codes, int32 from 0 to 15."""
    magnitude = code & 7
    # 252 << 22 is the exponent field of 0.5: codes from 2 on are normal fp32 values.
    normal = ((magnitude + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def mxfp4_to_bf16(code, exponent):
    """Value of e2m1 codes times 2^(exponent - 127), exact.

    An exponent of 0 gives 0 and one of 255, which is NaN, infinity.
    """
    value = e2m1_value(code)
    return (value * (exponent << 23).to(tl.float32, bitcast=True)).to(tl.bfloat16)
