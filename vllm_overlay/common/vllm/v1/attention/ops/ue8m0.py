# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""UE8M0 block scales: powers of two."""

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton


@triton.jit
def ue8m0_exponent(scale):
    """ceil(log2(scale)) in fp32, for a positive normal fp32 `scale`."""
    return tl.ceil(tl.log2(scale))


@triton.jit
def ue8m0_scale(exponent):
    """2**exponent in fp32, for an integer `exponent` in fp32, at least -126."""
    return tl.exp2(exponent)


@triton.jit
def _exponent_from_bits(scale):
    bits = scale.to(tl.uint32, bitcast=True)
    return (((bits + 0x7FFFFF) >> 23).to(tl.int32) - 127).to(tl.float32)


@triton.jit
def _scale_from_bits(exponent):
    biased = tl.minimum(tl.maximum(exponent + 127.0, 0.0), 255.0)
    return (biased.to(tl.int32) << 23).to(tl.float32, bitcast=True)


if current_platform.is_xpu():
    # Its log2 is not known to be exact at powers of two: there, an error of one unit
    # in the last place makes the exponent one too large.
    ue8m0_exponent = _exponent_from_bits
    ue8m0_scale = _scale_from_bits
