# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The softmax over one tile of scores, heads first."""

from ..xpu_dsv4._triton import tl, triton


@triton.jit
def softmax_weights(
    scores,  # [BLOCK_H, BLOCK_N] fp32
    key_mask,  # [BLOCK_N]
    qk_scale,
    row_max,  # [BLOCK_H] fp32
):
    """The weights of one tile of scores.

    Returns:
        (p, rescale, row_max): fp32 weights `[BLOCK_H, BLOCK_N]`, the factor `[BLOCK_H]`
        for everything accumulated before, and the new maximum.

    """
    # [BLOCK_H, BLOCK_N]
    logits = tl.where(key_mask[None, :], scores * qk_scale, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))  # [BLOCK_H]
    rescale = tl.exp2(row_max - new_max)  # [BLOCK_H]
    p = tl.exp2(logits - new_max[:, None])  # [BLOCK_H, BLOCK_N]
    return p, rescale, new_max


@triton.jit
def softmax_step(
    scores,  # [BLOCK_H, BLOCK_N] fp32
    key_mask,  # [BLOCK_N]
    qk_scale,
    row_max,  # [BLOCK_H] fp32
    row_sum,  # [BLOCK_H] fp32
):
    """Take one tile of scores into the softmax.

    Returns:
        (p, rescale, row_max, row_sum): bf16 weights `[BLOCK_H, BLOCK_N]`, the factor
        `[BLOCK_H]` for everything accumulated before, and the new maximum and sum.

    """
    # [BLOCK_H, BLOCK_N], then [BLOCK_H] each
    p, rescale, row_max = softmax_weights(scores, key_mask, qk_scale, row_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    return p.to(tl.bfloat16), rescale, row_max, row_sum
