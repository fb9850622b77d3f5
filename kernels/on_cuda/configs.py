# SPDX-License-Identifier: Apache-2.0
"""How launches on CUDA are divided into programs, measured on an H200."""

from ..xpu_dsv4._decode_config import DecodeConfig, share_keys
from ..xpu_dsv4._launch import cdiv
from ..xpu_dsv4._merge import FEW_SPLITS
from ..xpu_dsv4._pages import HEAD_DIM
from ..xpu_dsv4._prefill_config import PrefillConfig


def decode_config(
    num_tokens: int, num_heads: int, max_keys: int, aligned: bool = True
) -> DecodeConfig:
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
        share_keys(
            num_tokens * cdiv(num_heads, block_h),
            cdiv(max_keys, block_n),
            programs,
            most=16 if num_heads <= 16 else 32,
        ),
        num_warps,
        num_stages=1,
        grf=128,
        q_blocks=False,
    )


def tokens_of_whole_waves(num_tokens: int, num_heads: int, max_keys: int) -> int:
    """Of a batch without splits the first tokens, whose programs fill every
    multiprocessor again and again; all of them where splits cannot share the others."""
    config = decode_config(num_tokens, num_heads, max_keys)
    head_blocks = cdiv(num_heads, config.block_h)
    programs = 264 if num_heads <= 16 else 132
    whole = num_tokens * head_blocks // programs * programs // head_blocks
    if config.splits > 1 or not 0 < whole < num_tokens:
        return num_tokens
    rest = decode_config(num_tokens - whole, num_heads, max_keys)
    return whole if rest.splits > 1 else num_tokens


def prefill_config(
    num_heads: int, aligned: bool = True, packed: bool = True
) -> PrefillConfig:
    """Small blocks of heads up to 16 of them."""
    block_h, num_warps = (64, 8) if num_heads > 16 else (16, 4)
    return PrefillConfig(
        block_h,
        block_n=64,
        num_warps=num_warps,
        num_stages=2,
        grf=128,
        q_blocks=False,
    )


def merge_tile(splits: int) -> tuple[int, int]:
    """Dims and warps of a program that merges: four programs for each row took longer
    than the decode before them. Beyond `FEW_SPLITS` the tile has too many rows for all
    dims."""
    return (HEAD_DIM, 2) if splits <= FEW_SPLITS else (128, 1)
