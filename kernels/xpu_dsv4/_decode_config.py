# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a sparse decode is divided into programs, and the workspace that this needs."""

import functools
from typing import NamedTuple

import torch

from ._launch import cdiv
from ._merge import MOST_SPLITS, PARTIAL_WIDTH
from ._tuned import tuned_rows

XE_CORES = 32
"""Xe-cores that are assumed where there is no XPU to ask, as of an Arc Pro B70."""
ENGINES = 8
"""Vector engines of an Xe-core."""
LARGE_GRF_THREADS = 32
"""Sub-groups with 256 registers that an Xe-core holds at once."""


class DecodeConfig(NamedTuple):
    """How one decode is divided into programs.

    Attributes:
        block_h: heads per tile.
        block_n: keys per tile.
        splits: programs that share the keys of a token.
        num_warps: warps per program; on XPU, sub-groups of 16 lanes.
        num_stages: depth of software pipelining.
        grf: registers per hardware thread on XPU, 128 or 256.
        dims_first: accumulate the transpose; `_dims_first` says why.
        q_blocks: load q by 2-dim blocks.

    """

    block_h: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    grf: int
    dims_first: bool
    q_blocks: bool


class TunedDecode(NamedTuple):
    """A measured configuration, for a range of heads; fields as in `DecodeConfig`.

    Attributes:
        least_heads: heads of `q` at least.
        most_heads: heads of `q` at most.
        programs: programs that fill the device; they decide the splits.

    """

    least_heads: int
    most_heads: int
    block_h: int
    block_n: int
    programs: int
    num_warps: int
    num_stages: int
    grf: int
    dims_first: bool
    q_blocks: bool

    def fits(self) -> bool:
        """Whether the kernel has this configuration."""
        return (
            self.least_heads <= self.most_heads
            and self.block_h in (16, 32, 64, 128)
            and self.block_n in (16, 32, 64)
            and self.programs > 0
            and self.num_warps in (1, 2, 4, 8, 16)
            and self.num_stages in (1, 2, 3, 4)
            and self.grf in (128, 256)
        )

    def config(
        self, num_tokens: int, num_heads: int, max_keys: int, aligned: bool
    ) -> DecodeConfig:
        """This configuration for one launch; arguments as for `decode_config`."""
        return DecodeConfig(
            self.block_h,
            self.block_n,
            _splits(
                num_tokens * cdiv(num_heads, self.block_h),
                cdiv(max_keys, self.block_n),
                self.programs,
                MOST_SPLITS,
            ),
            self.num_warps if aligned or not self.q_blocks else 2 * self.num_warps,
            self.num_stages,
            self.grf,
            self.dims_first,
            self.q_blocks and aligned,
        )


def decode_config(
    device_type: str,
    num_tokens: int,
    num_heads: int,
    max_keys: int,
    aligned: bool = True,
) -> DecodeConfig:
    """The configuration for one launch, from sizes that the host knows.

    One that was measured on this device wins.

    Args:
        device_type (str):
            `torch.device.type`. `cuda` was tuned on an H200. Every other device takes
            the shapes that compile for Intel GPUs without a register spill.
        num_tokens (int):
            Tokens of `q`.
        num_heads (int):
            Heads of `q`.
        max_keys (int):
            Columns of `topk_indices` and of `swa_indices` together.
        aligned (bool):
            Whether 2-dim block loads can read `q`. On Intel GPUs twice the sub-groups
            share a program where they cannot: then nothing spills either.

    """
    for row in tuned_rows("sparse_decode", device_type, TunedDecode, TunedDecode.fits):
        if row.least_heads <= num_heads <= row.most_heads:
            return row.config(num_tokens, num_heads, max_keys, aligned)
    if device_type == "cuda":
        return _cuda_config(num_tokens, num_heads, max_keys)
    block_n = 16
    if num_heads <= 16:
        block_h, num_warps = 16, 4
    elif num_heads <= 32:
        block_h, num_warps = 32, 8
    else:
        block_h, num_warps = 64, 16
    return DecodeConfig(
        block_h,
        block_n,
        # As many programs as the device holds at once. More would only write and read
        # more partials.
        _splits(
            num_tokens * cdiv(num_heads, block_h),
            cdiv(max_keys, block_n),
            programs=_xe_cores() * LARGE_GRF_THREADS // num_warps,
            most=MOST_SPLITS,
        ),
        num_warps if aligned else 2 * num_warps,
        num_stages=1,
        grf=256,
        dims_first=True,
        q_blocks=aligned,
    )


def _cuda_config(num_tokens: int, num_heads: int, max_keys: int) -> DecodeConfig:
    """Small blocks of heads where one wave of them takes all tiles of keys."""
    small_tiles = num_tokens * cdiv(num_heads, 16) * cdiv(max_keys, 32)
    if num_heads <= 16 or small_tiles <= 128:
        block_h, block_n, num_warps, programs = 16, 32, 4, 264
    # Of 96 keys at most, a batch would have one split here and a larger one two.
    elif small_tiles <= 256 and max_keys > 96:
        block_h, block_n, num_warps, programs = 16, 64, 8, 132
    else:
        block_h, block_n, num_warps, programs = 64, 64, 8, 132
    return DecodeConfig(
        block_h,
        block_n,
        _splits(
            num_tokens * cdiv(num_heads, block_h),
            cdiv(max_keys, block_n),
            programs,
            most=16 if num_heads <= 16 else 32,
        ),
        num_warps,
        num_stages=1,
        grf=128,
        dims_first=False,
        q_blocks=False,
    )


@functools.cache
def _xe_cores() -> int:
    """Xe-cores of the XPU."""
    if not torch.xpu.is_available():
        return XE_CORES
    return torch.xpu.get_device_properties().max_compute_units // ENGINES


def _splits(unsplit: int, tiles: int, programs: int, most: int) -> int:
    """By how many programs to share the keys of a token, so that none is idle.

    Args:
        unsplit (int):
            Programs without a split.
        tiles (int):
            Tiles of keys; there are at most so many splits.
        programs (int):
            Programs that fill the device.
        most (int):
            Splits at most.

    """
    wanted = max(min(programs // max(unsplit, 1), tiles, most), 1)
    tiles_per_split = max(cdiv(tiles, wanted), 1)
    return max(cdiv(tiles, tiles_per_split), 1)


def sparse_decode_workspace_size(
    max_num_tokens: int, num_heads: int, max_keys: int, device_type: str = "xpu"
) -> int:
    """Elements of a `workspace` that serves every batch up to `max_num_tokens`.

    This is the largest num_tokens * num_heads * splits * 514, the size of the partials
    that `_merge` reads. No batch larger than the first one without a split has splits,
    so the search ends there.

    Args:
        max_num_tokens (int):
            Tokens of `q` at most.
        num_heads (int):
            Heads of `q`.
        max_keys (int):
            Columns of `topk_indices` and of `swa_indices` together, at most.
        device_type (str):
            As for `decode_config`.

    Returns:
        Number of fp32 elements.

    """
    most = 0
    for tokens in range(1, max_num_tokens + 1):
        splits = decode_config(device_type, tokens, num_heads, max_keys).splits
        if splits == 1:
            break
        most = max(most, tokens * num_heads * splits * PARTIAL_WIDTH)
    return most
