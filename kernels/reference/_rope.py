# SPDX-License-Identifier: Apache-2.0
"""Interleaved rotary embedding in float64."""

import torch


def rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate the pairs (x[2i], x[2i+1]) of the last R values of each row.

    Args:
        x (torch.Tensor):
            Rows of shape `[T, ..., D]`, float64.
        positions (torch.Tensor):
            Position of each row, of shape `[T]`. A position outside the table leaves
            the row unrotated.
        cos_sin_cache (torch.Tensor):
            Table of shape `[P, R]`: R/2 cosines, then R/2 sines.
        inverse (bool):
            Rotate by minus the angle.

    Returns:
        Rows of the shape of `x`, float64.
    """
    rope_dim = cos_sin_cache.shape[1]
    inside = (positions >= 0) & (positions < cos_sin_cache.shape[0])
    table = cos_sin_cache.double()[positions.where(inside, 0).long()]
    cos, sin = table.chunk(2, dim=-1)
    cos = cos.where(inside[:, None], 1.0)
    sin = sin.where(inside[:, None], 0.0)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (rope_dim // 2,)
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    head, tail = x.split((x.shape[-1] - rope_dim, rope_dim), dim=-1)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((head, turned.flatten(-2)), dim=-1)
