# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merging the partial attention of key splits, with the attention sink.

A partial is (m, l, o): the largest score in log2 units, the sum of 2^(score - m), and
the values weighted by 2^(score - m). With M the largest m of all splits, the attention
is sum(o * 2^(m - M)) / (sum(l * 2^(m - M)) + 2^(sink * log2(e) - M)).
"""

import torch

from .._launch import launch_options, next_power_of_2
from .._pages import HEAD_DIM
from .._softmax import EMPTY_MAX, softmax_factor
from .._triton import tl, triton
from ._output import (
    Fp8Output,
    heads_per_group,
    output_arguments,
    store_heads,
)

PARTIAL_WIDTH = HEAD_DIM + 2
"""fp32 values of one (token, head, split): 512 of o, then m and l."""
MOST_SPLITS = 32
"""Programs that share the keys of a token, at most."""
FEW_SPLITS = 8
"""Up to these a tile has as many rows as there are splits; beyond, `MOST_SPLITS`."""


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "group_tokens", "max_position"],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def _merge_kernel(
    partial_ptr,
    sink_ptr,
    out_ptr,
    num_rows,
    num_heads,
    num_splits,
    out_token_stride,
    out_head_stride,
    scales_ptr,
    positions_ptr,
    cos_sin_ptr,
    group_tokens,
    max_position,
    cos_sin_stride,
    HAS_SINK: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
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
    one_head = tl.full([1], head, tl.int64)  # [1]
    store_heads(
        (acc * factor)[None, :],
        one_head,
        one_head < num_heads,
        tl.program_id(1) * BLOCK_D,
        token,
        out_ptr,
        scales_ptr,
        positions_ptr,
        cos_sin_ptr,
        out_token_stride,
        out_head_stride,
        group_tokens,
        max_position,
        cos_sin_stride,
        HEADS_PER_GROUP,
        1,
        BLOCK_D,
    )


def merge_tile(splits: int) -> tuple[int, int]:
    """Dims and warps of a program that merges so many splits."""
    return 128, 4


def merge_splits(
    partial: torch.Tensor,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor | Fp8Output,
    num_tokens: int,
    num_heads: int,
    splits: int,
) -> None:
    """Merge the partials of each row into `out`; a partial without keys counts nothing.

    Args:
        partial (torch.Tensor):
            Partials of shape `[num_tokens * num_heads * splits * 514]`, fp32: all o,
            then all pairs (m, l).
        attn_sink (torch.Tensor | None):
            Sinks of shape `[num_heads]`, fp32 or bf16, in natural-log units.
        out (torch.Tensor | Fp8Output):
            Attention of shape `[num_tokens, num_heads, 512]`, bf16, written in place,
            or the operands that are made of it.
        num_tokens (int):
            Tokens.
        num_heads (int):
            Heads.
        splits (int):
            Partials per row.

    """
    block_d, num_warps = merge_tile(splits)
    output = output_arguments(out)
    _merge_kernel[(num_tokens * num_heads, HEAD_DIM // block_d)](
        partial,
        attn_sink,
        output.pointer,
        num_tokens * num_heads,
        num_heads,
        splits,
        *output.strides,
        *output.operands,
        HAS_SINK=attn_sink is not None,
        HEADS_PER_GROUP=heads_per_group(out),
        BLOCK_S=next_power_of_2(splits) if splits <= FEW_SPLITS else MOST_SPLITS,
        BLOCK_D=block_d,
        **launch_options(partial.device, num_warps=num_warps),
    )
