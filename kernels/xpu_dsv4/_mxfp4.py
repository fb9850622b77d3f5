# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading MXFP4: e2m1 codes under one UE8M0 exponent for each 32 values."""

from ._triton import tl, triton

MXFP4_BLOCK = 32
SCALES_A_WORD = 4


@triton.jit
def mxfp4_to_bf16(code, exponent):
    """Value of e2m1 codes, int32 from 0 to 15, times 2^(exponent - 127).

    An exponent of 0 gives 0 and one of 255, which is NaN, infinity.
    """
    magnitude = code & 7
    # 252 << 22 is the exponent field of 0.5: codes from 2 on are normal fp32 values.
    normal = ((magnitude + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    value = tl.where((code & 8) != 0, -value, value)
    return (value * (exponent << 23).to(tl.float32, bitcast=True)).to(tl.bfloat16)
