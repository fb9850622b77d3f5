# SPDX-License-Identifier: Apache-2.0
"""The shared ops of DeepSeek-V4 in float64 torch and plain Python, byte for byte where
they quantize or count."""

from collections.abc import Sequence

import torch

E4M3, E2M1 = 448.0, 6.0
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.double)


def exponent(blocks: torch.Tensor, largest: float, floor: float) -> torch.Tensor:
    """The least k per row of `[..., n]` with max(amax, floor) <= largest * 2^k."""
    amax = blocks.double().abs().amax(-1).clamp(min=floor)
    mantissa, power = torch.frexp(amax / largest)
    return power - (mantissa == 0.5).to(power.dtype)


def e4m3(blocks: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Codes of `[..., n]` under 2^k for each row."""
    scaled = torch.ldexp(blocks.double(), -k[..., None]).clamp(-E4M3, E4M3)
    return scaled.to(torch.float8_e4m3fn)


def e2m1(blocks: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Packed codes of `[..., n]` under 2^k, the even value in the low nibble; ties go
    to the even code."""
    scaled = torch.ldexp(blocks.double(), -k[..., None])
    distance = (scaled.abs()[..., None] - E2M1_VALUES).abs()
    nearest = distance.amin(-1, keepdim=True)
    tied = distance == nearest
    odd = torch.arange(8) % 2
    code = (tied * (2 - odd)).argmax(-1) + 8 * (scaled.signbit()).long()
    return (code[..., ::2] | code[..., 1::2] << 4).to(torch.uint8)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """Interleaved RoPE on the last dims of `[..., D]` by `sign` times the angles whose
    cosines and sines are in `cos_sin`, `[..., 2 * pairs]`."""
    cos, sin = cos_sin.double().chunk(2, dim=-1)
    width = cos_sin.shape[-1]
    plain, rope = x.double().split([x.shape[-1] - width, width], dim=-1)
    even, odd = rope[..., ::2], rope[..., 1::2]
    turned = (even * cos - odd * sin * sign, odd * cos + even * sin * sign)
    return torch.cat((plain, torch.stack(turned, -1).flatten(-2)), -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def page_row(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(576 bytes of data, 8 bytes of exponents) of one token's 512 bf16 values."""
    blocks = k[:448].view(7, 64)
    power = exponent(blocks, E4M3, 1e-4)
    codes = e4m3(blocks, power).view(torch.uint8).flatten()
    scales = torch.cat((power + 127, power.new_zeros(1))).to(torch.uint8)
    return torch.cat((codes, k[448:].contiguous().view(torch.uint8))), scales


def entry(
    kv: torch.Tensor,
    score: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ratio: int,
    position: int,
) -> torch.Tensor:
    """The compressed entry that ends at `position`, normalized, before RoPE.

    `kv` and `score` are a request's partial states, `[T, width]`: twice the head's
    width where windows overlap, its first half for the entry after the next.
    """
    head = len(weight)
    own = range(position - ratio + 1, position + 1)
    rows = [(at, kv.shape[1] - head) for at in own]
    if kv.shape[1] > head:
        rows = [(at - ratio, 0) for at in own if at >= ratio] + rows
    picked = [torch.stack([x[at, c : c + head] for at, c in rows]) for x in (kv, score)]
    values, logits = (x.double() for x in picked)
    return rms_norm((values * logits.softmax(0)).sum(0), weight, eps)


def global_slots(
    local: Sequence[Sequence[int]],
    requests: Sequence[int],
    block_table: torch.Tensor,
    block_size: int,
    valid: Sequence[bool],
) -> tuple[list[list[int]], list[int]]:
    """Slots of each token's positions in its request, and how many it has."""
    slots = [
        [slot(block_table[request], at, block_size) if at >= 0 else -1 for at in row]
        for row, request in zip(local, requests, strict=True)
    ]
    lens = [
        sum(at >= 0 for at in row) if real else 0
        for row, real in zip(local, valid, strict=True)
    ]
    return slots, lens


def slot(blocks: torch.Tensor, position: int, block_size: int) -> int:
    return int(blocks[position // block_size]) * block_size + position % block_size


def window(position: int, width: int) -> range:
    """The positions that a token sees uncompressed, itself included."""
    return range(max(position - width + 1, 0), position + 1)
