# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The online softmax of attention with a sink, in base 2.

Kernels pass `scale * log2(e)` as `qk_scale`, so that exp2 replaces exp; a sink, in
natural-log units, is scaled in the same way. The running maximum starts at -1e30, a
finite number: a row without keys then has the sum 0, and no inf - inf occurs.

Source: Online normalizer calculation for softmax, arXiv:1805.02867.
"""

import torch

from ._checks import check_dtype, check_inner_contiguous, fail
from ._triton import tl, triton

LOG2E = 1.4426950408889634
EMPTY_MAX = -1.0e30
"""Running maximum of a row before its first key."""
MOST_RISE = 8.0
"""How far scores may lie above a running maximum that stays as it is."""


def check_sink(attn_sink: torch.Tensor | None, num_heads: int) -> None:
    """Raise unless `attn_sink` is None or one fp32 or bf16 value for each head."""
    if attn_sink is None:
        return
    check_dtype("attn_sink", attn_sink, torch.float32, torch.bfloat16)
    if attn_sink.dim() != 1 or attn_sink.shape[0] < num_heads:
        fail("attn_sink.shape", list(attn_sink.shape), f"[at least {num_heads}]")
    check_inner_contiguous("attn_sink", attn_sink)


@triton.jit
def exceeds_maximum(
    logits,  # [BLOCK_H, BLOCK_N] fp32
    row_max,  # [BLOCK_H] fp32
    MOST_RISE: tl.constexpr = MOST_RISE,
):
    """Whether a score lies more than MOST_RISE above the maximum of its row.

    Until one does, the maximum may stay as it is and nothing needs rescaling: weights
    are at most 2^8. NaN does not exceed; its weight is NaN under any maximum.
    """
    exceeds_mask = logits > row_max[:, None] + MOST_RISE  # [BLOCK_H, BLOCK_N]
    return tl.max(tl.max(exceeds_mask.to(tl.int32), 0), 0) > 0


@triton.jit
def softmax_factor(
    row_max,
    row_sum,
    sink_ptr,
    head,
    head_mask,
    HAS_SINK: tl.constexpr,
    LOG2E: tl.constexpr = LOG2E,
):
    """1 / (row_sum + the sink's share), or 0 for a row without keys; element-wise.

    `head_mask` is None where all heads exist. A sum of NaN gives NaN.
    """
    total = row_sum
    if HAS_SINK:
        if head_mask is None:
            sink = tl.load(sink_ptr + head)
        else:
            sink = tl.load(sink_ptr + head, mask=head_mask, other=float("-inf"))
        total += tl.exp2(sink.to(tl.float32) * LOG2E - row_max)
    has_keys = row_sum != 0.0
    return tl.where(has_keys, 1.0 / tl.where(has_keys, total, 1.0), 0.0)
