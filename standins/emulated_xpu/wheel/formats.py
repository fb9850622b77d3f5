# SPDX-License-Identifier: Apache-2.0
"""The quantized formats that several ops share: power-of-two scales, e4m3 codes without
subnormals, e2m1 codes, MXFP4 and INT4 values, and block scales."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7; the codes 8 to 15 are their negatives."""


def quotient(value: torch.Tensor, divisor: float) -> torch.Tensor:
    """`value / divisor`, rounded once.

    For a number, torch on a GPU multiplies with its inverse, and 448 / 448 may then be
    more than 1, whose next power of two is 2.
    """
    return value / torch.full_like(value, divisor)


def power_of_two_exponent(ratio: torch.Tensor) -> torch.Tensor:
    """ceil(log2(ratio)) of a positive fp32 value, exact: from its mantissa and
    exponent."""
    mantissa, exponent = torch.frexp(ratio)
    return exponent - (mantissa == 0.5).int()


def next_power_of_two(value: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below a positive fp32 `value`."""
    return torch.ldexp(torch.ones_like(value), power_of_two_exponent(value))


def e4m3_codes_without_subnormals(
    values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """The bytes of `values / scales` as the SYCL kernels assemble them from the bits
    of an fp32 value and of a scale that is a power of two.

    Nearest, ties to even, down to 2^-6. From 2^-7 to 2^-6 the byte holds the three
    bits after the leading one and no leading one: x becomes 2 * x - 2^-6, to a
    multiple of 2^-9. Below 2^-7 it is zero. Values beyond 448 are not expected.
    """
    bits = values.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    code, rest = mantissa >> 20, mantissa & 0xFFFFF
    code += (rest > 0x80000) | ((rest == 0x80000) & (code % 2 == 1))
    shift = exponent - (scales.view(torch.int32) >> 23)
    code += (shift + 7) << 3
    code = torch.where(shift >= -7, code, 0) & 0x7F
    return (code | (bits >> 24 & 0x80)).to(torch.uint8)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Nibbles of the nearest e2m1 values, ties to even, saturating at 6."""
    size = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    bounds = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    for lower, bound in enumerate(bounds):
        # A midpoint goes to the neighbour with the even code.
        code += (size >= bound) if lower % 2 else (size > bound)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """`[..., D]` nibbles as `[..., D / 2]` bytes, the even index in the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def mxfp4_to_float(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 values in fp32.

    Args:
        packed: `[N, K / 2]` bytes, the even column in the low nibble.
        scales: `[N, K / 32]` UE8M0, as uint8 or float8_e8m0fnu.
    """
    codes = packed.view(torch.uint8)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    power = torch.exp2(scales.view(torch.uint8).float() - 127)
    return values[nibbles] * power.repeat_interleave(32, dim=-1)


def int4_to_float(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Signed INT4 values in fp32.

    Args:
        packed: `[N, K / 2]` bytes, the even column in the low nibble, two's complement.
        scales: `[N, K / group]`, of any group.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    values = torch.where(codes < 8, codes.float(), codes.float() - 16)
    group = values.shape[-1] // scales.shape[-1]
    return values * scales.float().repeat_interleave(group, dim=-1)


def expanded(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`scale` repeated to `shape`. Along each dimension a scale covers a block of equal
    size, or everything.

    Raises:
        ValueError: the scales do not tile `shape`.
    """
    for dim, (blocks, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if size % blocks:
            raise ValueError(f"scales {tuple(scale.shape)} do not tile {tuple(shape)}")
        scale = scale.repeat_interleave(size // blocks, dim)
    return scale
