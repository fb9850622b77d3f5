# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a sparse prefill is divided into programs and tiles."""

from typing import NamedTuple


class PrefillConfig(NamedTuple):
    """How one prefill is divided into programs and tiles.

    Attributes:
        block_h: heads per tile.
        block_n: keys per tile.
        num_warps: warps per program; on XPU, sub-groups of 16 lanes.
        num_stages: depth of software pipelining.
        grf: registers per hardware thread on XPU, 128 or 256.
        q_blocks: load q by 2-dim blocks.
        dim_lanes: the form in which the lanes share the dims of a key.

    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    grf: int
    q_blocks: bool
    dim_lanes: bool = False


def prefill_config(
    num_heads: int, aligned: bool = True, packed: bool = True
) -> PrefillConfig:
    """The configuration for one launch.

    Args:
        num_heads (int):
            Heads of `q`.
        aligned (bool):
            Whether 2-dim block loads can read `q`.
        packed (bool):
            Whether the rows of `kv` lie without gaps.

    """
    if num_heads <= 16 and aligned and packed:
        # A q that is not aligned was not compiled in this form. Two tiles of keys in an
        # iteration would spill with 16 heads.
        block_h, block_n = (8, 32) if num_heads <= 8 else (16, 16)
        return PrefillConfig(
            block_h,
            block_n,
            num_warps=8,
            num_stages=1,
            grf=256,
            q_blocks=False,
            dim_lanes=True,
        )
    if num_heads <= 16:
        block_h, num_warps = 16, 8
    elif num_heads <= 32:
        block_h, num_warps = 32, 16
    else:
        block_h, num_warps = 64, 16 if aligned else 32
    return PrefillConfig(
        block_h,
        block_n=16,
        num_warps=num_warps,
        num_stages=1,
        grf=256,
        q_blocks=aligned,
    )
