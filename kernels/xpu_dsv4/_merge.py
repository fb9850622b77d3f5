# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merging the partial attention of key splits, with the attention sink.

A partial is (m, l, o): the largest score in log2 units, the sum of 2^(score - m), and
the values weighted by 2^(score - m). The attention is
sum(o * 2^(m - M)) / (sum(l * 2^(m - M)) + 2^(sink * log2(e) - M)).
"""

import torch

from ._launch import launch_options
from ._softmax import finish
from ._triton import tl, triton

PARTIAL_WIDTH = 512 + 2
"""fp32 values of one (token, head, split): 512 of o, then m and l."""


@triton.jit(do_not_specialize=["num_splits"])
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
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    splits = tl.arange(0, SPLITS)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    state = partial_ptr + num_rows.to(tl.int64) * num_splits * 512
    state += (row * num_splits + splits) * 2
    part_max = tl.load(state, mask=splits < num_splits, other=-1.0e30)
    part_sum = tl.load(state + 1, mask=splits < num_splits, other=0.0)
    full = part_sum > 0.0
    row_max = tl.max(part_max, 0)
    weight = tl.where(full, tl.exp2(part_max - row_max), 0.0)
    row_sum = tl.sum(part_sum * weight, 0)

    parts = partial_ptr + (row * num_splits + splits)[:, None] * 512 + dims[None, :]
    o = tl.load(parts, mask=full[:, None], other=0.0)
    o = tl.sum(o * weight[:, None], 0)
    factor = finish(row_max, row_sum, sink_ptr, head, head >= 0, HAS_SINK)
    target = out_ptr + token * out_token_stride + head * out_head_stride + dims
    tl.store(target, (o * factor).to(tl.bfloat16))


def merge_splits(
    partial: torch.Tensor,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    splits: int,
) -> None:
    """Merge `splits` partials of each row into `out`; parts without keys weigh 0.

    Args:
        partial: fp32, `[tokens * heads * splits * 514]`: all o, then all (m, l).
        attn_sink: fp32 `[heads]` in natural-log units, or None.
        out: bf16 `[tokens, heads, 512]`, written in place.
        splits: partials a row.

    """
    num_tokens, num_heads, _ = out.shape
    block_d = 128
    _merge_kernel[(num_tokens * num_heads, 512 // block_d)](
        partial,
        attn_sink,
        out,
        num_tokens * num_heads,
        num_heads,
        splits,
        out.stride(0),
        out.stride(1),
        HAS_SINK=attn_sink is not None,
        SPLITS=triton.next_power_of_2(splits),
        BLOCK_D=block_d,
        **launch_options(out.device, num_warps=4),
    )
