# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a sparse decode is divided into programs, and the workspace that this needs."""

from typing import NamedTuple

from .. import _device
from .._launch import cdiv
from ._merge import MOST_SPLITS, PARTIAL_WIDTH

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
        q_blocks: load q by 2-dim blocks.

    """

    block_h: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    grf: int
    q_blocks: bool


def decode_config(
    num_tokens: int, num_heads: int, max_keys: int, aligned: bool = True
) -> DecodeConfig:
    """The configuration for one launch, from sizes that the host knows.

    Its shapes compile for Intel GPUs without a register spill.

    Args:
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
        share_keys(
            num_tokens * cdiv(num_heads, block_h),
            cdiv(max_keys, block_n),
            programs=_device.xe_cores() * LARGE_GRF_THREADS // num_warps,
            most=MOST_SPLITS,
        ),
        num_warps if aligned else 2 * num_warps,
        num_stages=1,
        grf=256,
        q_blocks=aligned,
    )


def share_keys(unsplit: int, tiles: int, programs: int, most: int) -> int:
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
    max_num_tokens: int, num_heads: int, max_keys: int
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

    Returns:
        Number of fp32 elements.

    """
    most = 0
    for tokens in range(1, max_num_tokens + 1):
        splits = decode_config(tokens, num_heads, max_keys).splits
        if splits == 1:
            break
        most = max(most, tokens * num_heads * splits * PARTIAL_WIDTH)
    return most
