# SPDX-License-Identifier: Apache-2.0
"""Where an entry of a page lies: all tokens' data first, then all tokens' scales."""

import torch


def entry_places(
    start: torch.Tensor,
    token: torch.Tensor,
    block_size: int,
    data_bytes: int,
    scale_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the bytes of entries: of data `[T, data_bytes]`, of scales
    `[T, scale_bytes]`.

    Args:
        start: `[T]`, the first byte of each entry's page.
        token: `[T]`, the entry's number in its page.
        block_size: entries of a page.
    """
    scales = start + block_size * data_bytes + token * scale_bytes
    return (
        _row(start + token * data_bytes, data_bytes),
        _row(scales, scale_bytes),
    )


def _row(first: torch.Tensor, width: int) -> torch.Tensor:
    return first[:, None] + torch.arange(width, device=first.device)


def all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage that `tensor` lies in, as bytes."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())
