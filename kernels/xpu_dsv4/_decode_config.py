# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a sparse decode is cut into programs, and the workspace that this takes."""

from typing import NamedTuple

from ._merge import PARTIAL_WIDTH
from ._triton import triton


class DecodeConfig(NamedTuple):
    """How one decode is cut into programs.

    block_h heads and block_n keys a tile; `splits` programs share a token's keys;
    `halves` programs of 256 value dims each share a head block; guard_pv puts the
    second product in a region of its own.
    """

    block_h: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    grf: int
    halves: int
    guard_pv: bool


def decode_config(
    device_type: str, num_tokens: int, num_heads: int, max_keys: int
) -> DecodeConfig:
    """The configuration for one launch, from sizes that the host knows.

    Args:
        device_type: `torch.device.type`; `cuda` is tuned on an H200, every other
            device takes the shapes that compile for Intel GPUs without a spill.
        num_tokens: rows of `q`.
        num_heads: heads of `q`.
        max_keys: `topk_indices` plus `swa_indices` columns.

    """
    if device_type == "cuda":
        return _cuda_config(num_tokens, num_heads, max_keys)
    block_n = 16
    if num_heads <= 8:
        block_h, num_warps = 8, 4
    elif num_heads <= 16:
        block_h, num_warps = 16, 8
    elif num_heads <= 32:
        block_h, num_warps = 32, 8
    else:
        block_h, num_warps = 64, 16
    splits = _splits(num_tokens, num_heads, max_keys, block_h, block_n, 256, 32)
    return DecodeConfig(block_h, block_n, splits, num_warps, 1, 256, 1, True)


def _cuda_config(num_tokens: int, num_heads: int, max_keys: int) -> DecodeConfig:
    if num_heads > 64 and num_tokens >= 8:
        splits = _splits(2 * num_tokens, num_heads, max_keys, 128, 64, 132, 16)
        return DecodeConfig(128, 64, splits, 8, 1, 128, 2, False)
    if num_heads > 16:
        splits = _splits(2 * num_tokens, num_heads, max_keys, 64, 32, 256, 32)
        return DecodeConfig(64, 32, splits, 4, 1, 128, 2, False)
    splits = _splits(num_tokens, num_heads, max_keys, 16, 32, 256, 16)
    return DecodeConfig(16, 32, splits, 4, 3, 128, 1, False)


def _splits(
    rows: int,
    num_heads: int,
    max_keys: int,
    block_h: int,
    block_n: int,
    programs: int,
    most: int,
) -> int:
    """Power-of-two splits that fill `programs` from `rows` unsplit ones a head block.

    At most `most`, and at most one a key tile.
    """
    busy = max(rows * triton.cdiv(num_heads, block_h), 1)
    wanted = min(programs // busy, triton.cdiv(max_keys, block_n), most)
    return 1 << max(wanted.bit_length() - 1, 0) if wanted > 0 else 1


def sparse_decode_workspace_size(
    max_num_tokens: int, num_heads: int, max_keys: int, device_type: str = "xpu"
) -> int:
    """fp32 elements of `workspace` that serve every batch up to `max_num_tokens`.

    The largest tokens * heads * splits * 514, the partials of `_merge`. Splits never
    grow with the batch, so the first batch without splits ends the search.

    Args:
        max_num_tokens: rows of `q` at most.
        num_heads: heads of `q`.
        max_keys: `topk_indices` plus `swa_indices` columns at most.
        device_type: see `decode_config`.

    """
    most = 0
    for tokens in range(1, max_num_tokens + 1):
        splits = decode_config(device_type, tokens, num_heads, max_keys).splits
        if splits == 1:
            break
        most = max(most, tokens * num_heads * splits * PARTIAL_WIDTH)
    return most
