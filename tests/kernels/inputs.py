# SPDX-License-Identifier: Apache-2.0
"""Inputs that several kernel tests share."""

import torch


def rotary_table(positions: int, rope_dim: int, device: torch.device) -> torch.Tensor:
    """A table of fp32 cosines and sines, plain RoPE with theta 1e4."""
    frequency = 1e4 ** (-torch.arange(0, rope_dim, 2).double() / rope_dim)
    angle = torch.arange(positions).double()[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float().to(device)


def exact_table(positions: int, rope_dim: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines from {-1, 0, 1}: turns that no rounding can tell apart."""
    quarter = torch.randint(0, 4, (positions, rope_dim // 2))
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0])[quarter]
    sin = torch.tensor([0.0, 1.0, 0.0, -1.0])[quarter]
    return torch.cat((cos, sin), dim=-1).to(device)


def strided(x: torch.Tensor, gap: int = 6) -> torch.Tensor:
    """The values of `x` with `gap` foreign ones after each row and between rows."""
    wide = torch.full(
        (*x.shape[:-1], x.shape[-1] + gap), 77.0, dtype=torch.float32, device=x.device
    ).to(x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def pages(
    blocks: int, block_size: int, device: torch.device, *, flat: bool = False
) -> torch.Tensor:
    """Pages of 0xA5 bytes, `[blocks, block_size, 584]`, block stride padded to 576."""
    size = block_size * 584
    stride = -(-size // 576) * 576
    raw = torch.full((blocks * stride,), 0xA5, dtype=torch.uint8, device=device)
    if flat:
        return raw.view(blocks, stride)
    return raw.as_strided((blocks, block_size, 584), (stride, 584, 1))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of a tensor's storage, gaps and padding included, on the CPU."""
    raw = torch.tensor([], dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage()).cpu().clone()
