# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merging the partial attention of key splits, with the attention sink.

A partial is (m, l, o): the largest score in log2 units, the sum of 2^(score - m), and
the values weighted by 2^(score - m). With M the largest m of all splits, the attention
is sum(o * 2^(m - M)) / (sum(l * 2^(m - M)) + 2^(sink * log2(e) - M)).
"""

import torch

from ._launch import launch_options
from ._pages import HEAD_DIM
from ._softmax import EMPTY_MAX, softmax_factor
from ._triton import tl, triton

PARTIAL_WIDTH = HEAD_DIM + 2
"""fp32 values of one (token, head, split): 512 of o, then m and l."""
MOST_SPLITS = 32
"""Programs that share the keys of a token, at most."""
FEW_SPLITS = 8
"""Up to these a tile has as many rows as there are splits; beyond, `MOST_SPLITS`."""


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_kernel(
    partial_ptr,
    sink_ptr,
    out_ptr,
    num_rows,
    num_heads,
    num_splits,
    out_token_stride,
    out_head_stride,
    HAS_SINK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
):
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    split_offs = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    dim_offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    states_ptr = partial_ptr + num_rows.to(tl.int64) * num_splits * HEAD_DIM
    state_ptrs = states_ptr + (row * num_splits + split_offs) * 2  # [BLOCK_S]
    split_mask = split_offs < num_splits  # [BLOCK_S]
    part_max = tl.load(state_ptrs, mask=split_mask, other=EMPTY_MAX)  # [BLOCK_S]
    part_sum = tl.load(state_ptrs + 1, mask=split_mask, other=0.0)  # [BLOCK_S]
    keys_mask = part_sum != 0.0  # [BLOCK_S], true for NaN
    row_max = tl.max(part_max, 0)
    weights = tl.where(keys_mask, tl.exp2(part_max - row_max), 0.0)  # [BLOCK_S]
    row_sum = tl.sum(part_sum * weights, 0)

    # [BLOCK_S, BLOCK_D]
    part_ptrs = (
        partial_ptr
        + (row * num_splits + split_offs)[:, None] * HEAD_DIM
        + dim_offs[None, :]
    )
    parts = tl.load(part_ptrs, mask=keys_mask[:, None], other=0.0)  # [BLOCK_S, BLOCK_D]
    acc = tl.sum(parts * weights[:, None], 0)  # [BLOCK_D]
    factor = softmax_factor(row_max, row_sum, sink_ptr, head, None, HAS_SINK)
    # [BLOCK_D]
    out_ptrs = out_ptr + token * out_token_stride + head * out_head_stride + dim_offs
    tl.store(out_ptrs, (acc * factor).to(tl.bfloat16))


def merge_tile(device_type: str, splits: int) -> tuple[int, int]:
    """Dims and warps of a program that merges.

    `cuda` was measured on an H200: there four programs for each row took longer than
    the decode before them. Beyond `FEW_SPLITS` the tile has too many rows for all dims.

    Args:
        device_type (str):
            `torch.device.type`.
        splits (int):
            Partials per row.

    """
    if device_type != "cuda":
        return 128, 4
    return (HEAD_DIM, 2) if splits <= FEW_SPLITS else (128, 1)


def merge_splits(
    partial: torch.Tensor,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    splits: int,
) -> None:
    """Merge the partials of each row into `out`; a partial without keys counts nothing.

    Args:
        partial (torch.Tensor):
            Partials of shape `[num_tokens * num_heads * splits * 514]`, fp32: all o,
            then all pairs (m, l).
        attn_sink (torch.Tensor | None):
            Sinks of shape `[num_heads]`, fp32 or bf16, in natural-log units.
        out (torch.Tensor):
            Attention of shape `[num_tokens, num_heads, 512]`, bf16, written in place.
        splits (int):
            Partials per row.

    """
    num_tokens, num_heads, _ = out.shape
    block_d, num_warps = merge_tile(out.device.type, splits)
    _merge_kernel[(num_tokens * num_heads, HEAD_DIM // block_d)](
        partial,
        attn_sink,
        out,
        num_tokens * num_heads,
        num_heads,
        splits,
        out.stride(0),
        out.stride(1),
        HAS_SINK=attn_sink is not None,
        BLOCK_S=triton.next_power_of_2(splits) if splits <= FEW_SPLITS else MOST_SPLITS,
        BLOCK_D=block_d,
        **launch_options(out.device, num_warps=num_warps),
    )
