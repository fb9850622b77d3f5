# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The online softmax of attention with a sink, in base 2.

Scores arrive as s * scale * log2(e), so that exp2 serves; a sink, in natural-log units,
is scaled alike. The maximum starts at -1e30, a finite number: an empty row then has the
sum 0, and no difference of infinities arises.
"""

import torch

from ._checks import check_dtype, check_inner_contiguous, fail
from ._triton import tl, triton

LOG2E = 1.4426950408889634


def check_sink(attn_sink: torch.Tensor | None, num_heads: int) -> None:
    """Raise unless `attn_sink` is None or one fp32 or bf16 value for each head."""
    if attn_sink is None:
        return
    check_dtype("attn_sink", attn_sink, torch.float32, torch.bfloat16)
    if attn_sink.dim() != 1 or attn_sink.shape[0] < num_heads:
        fail("attn_sink.shape", list(attn_sink.shape), f"[at least {num_heads}]")
    check_inner_contiguous("attn_sink", attn_sink)


@triton.jit
def softmax_step(score, valid, qk_scale, row_max, row_sum):
    """One tile of scores: bf16 weights, factor of what came before, maximum, sum."""
    score = tl.where(valid[None, :], score * qk_scale, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1))
    rescale = tl.exp2(row_max - new_max)
    weight = tl.exp2(score - new_max[:, None])
    row_sum = row_sum * rescale + tl.sum(weight, 1)
    return weight.to(tl.bfloat16), rescale, new_max, row_sum


@triton.jit
def finish(row_max, row_sum, sink_ptr, heads, mask, HAS_SINK: tl.constexpr):
    """1 / (row_sum + the sink's share), 0 for rows without keys."""
    total = row_sum
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=mask, other=float("-inf")).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - row_max)
    has_keys = row_sum > 0.0
    return tl.where(has_keys, 1.0 / tl.where(has_keys, total, 1.0), 0.0)
