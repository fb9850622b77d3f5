# SPDX-License-Identifier: Apache-2.0
"""Block quantization in float64: the bytes that the kernels must produce."""

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def block_exponent(
    x: torch.Tensor, block: int, largest: float, floor: float
) -> torch.Tensor:
    """Biased exponent of each block of `block` values along the last dimension.

    Args:
        x (torch.Tensor):
            Values of shape `[..., n * block]`, float64.
        block (int):
            Values that share a scale.
        largest (float):
            Largest value of the format, m * 2^k with a short mantissa m.
        floor (float):
            Least absolute maximum assumed of a block.

    Returns:
        ceil(log2(max(amax, floor) / largest)) + 127, int64 of shape `[..., n]`. No
        quotient is rounded: amax <= largest * 2^e is tested instead.
    """
    amax = x.unflatten(-1, (-1, block)).abs().amax(-1)
    amax = amax.clamp(min=float(torch.tensor(floor, dtype=torch.float32)))
    guess = torch.frexp(amax).exponent.long() - 10
    base = torch.full_like(amax, largest)
    for _ in range(10):
        guess += (amax > torch.ldexp(base, guess)).long()
    return guess + 127


def e4m3_bytes(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """e4m3fn bytes of `x / 2^(exponent - 127)`, with one exponent per block."""
    block = x.shape[-1] // exponent.shape[-1]
    scaled = torch.ldexp(x.unflatten(-1, (-1, block)), 127 - exponent.unsqueeze(-1))
    codes = scaled.clamp(-448.0, 448.0).float().to(torch.float8_e4m3fn)
    return codes.flatten(-2).view(torch.uint8)


def e4m3_values(codes: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Float64 values of e4m3fn bytes, with one biased exponent per block."""
    block = codes.shape[-1] // exponent.shape[-1]
    values = codes.contiguous().view(torch.float8_e4m3fn).double()
    scaled = torch.ldexp(
        values.unflatten(-1, (-1, block)), exponent.long().unsqueeze(-1) - 127
    )
    return scaled.flatten(-2)


def e2m1_nibbles(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """e2m1 codes of `x / 2^(exponent - 127)`, ties to even, one uint8 per value."""
    block = x.shape[-1] // exponent.shape[-1]
    scaled = torch.ldexp(x.unflatten(-1, (-1, block)), 127 - exponent.unsqueeze(-1))
    scaled = scaled.flatten(-2)
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=x.device)
    distance = (scaled.abs().clamp(max=6.0).unsqueeze(-1) - grid).abs()
    # An even code wins a tie: the distance of an odd one counts as slightly more.
    odd = torch.arange(8, device=x.device) % 2
    nearest = (distance + odd * 2.0**-40).argmin(-1)
    return (nearest + 8 * torch.signbit(scaled).long()).to(torch.uint8)
