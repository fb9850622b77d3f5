# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MXFP4 operands of the indexer's scores as a sub-group of an Intel GPU takes them.

As in `_logits_lanes`, a key is a row of the product and the lanes of a sub-group share
its dims. A lane has a word of eight e2m1 codes of each vector, all of one block, and
its code `i` is dim `lane` of part `i`: eight products of 16 dims into the same sums.

A sub-group has 32 keys, so it reads each query once for 32 of them, and their values
take half of its registers. For the rest to be enough, heads come in groups of 16, and
the first group multiplies each part of the keys as soon as it has values.
"""

from .._fp4 import MXFP4_BLOCK, mxfp4_nibble
from .._triton import tl, triton
from .._ue8m0 import exponent_scale
from ._logits_lanes import LANES

CODES_A_WORD = 8
GROUP = 16
"""Heads of a product."""


@triton.jit
def word_queries(
    q_ptr,
    q_scales_ptr,
    weights_ptr,
    num_heads,
    q_head_stride,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr = GROUP,
    LANES: tl.constexpr = LANES,
    CODES_A_WORD: tl.constexpr = CODES_A_WORD,
    MXFP4_BLOCK: tl.constexpr = MXFP4_BLOCK,
):
    """The parts of each group of heads, `[LANES, GROUP]` bf16 each, and the groups'
    weights, `[GROUP]` each.

    Heads that do not exist are the codes of the first, without a scale and without a
    weight: a load with a mask is a branch, and no product overflows.
    """
    lane_offs = tl.arange(0, LANES)[:, None]  # [LANES, 1]
    queries = ()
    weights = ()
    for first_head in tl.static_range(0, BLOCK_H, GROUP):
        head_offs = first_head + tl.arange(0, GROUP)  # [GROUP]
        head_mask = head_offs < num_heads  # [GROUP]
        heads = tl.where(head_mask, head_offs, 0)  # [GROUP]
        group_weights = tl.load(weights_ptr + heads)  # [GROUP]
        group_weights = tl.where(head_mask, group_weights, 0.0)  # [GROUP]
        weights += (group_weights,)  # type: ignore[assignment]
        word_ptrs = q_ptr + heads[None, :] * q_head_stride  # [1, GROUP]
        # By words, of which a lane then takes two in a row: so it stores their values.
        word_ptrs = word_ptrs.to(tl.pointer_type(tl.int32)) + lane_offs
        words = tl.load(word_ptrs)  # [LANES, GROUP]
        exponents = tl.load(q_scales_ptr + heads)  # [GROUP]
        exponents = tl.where(head_mask, exponents, 0)[None, :]  # [1, GROUP]
        blocks = lane_offs * CODES_A_WORD // MXFP4_BLOCK  # [LANES, 1]
        # [LANES, GROUP]
        scales = exponent_scale((exponents >> (8 * blocks)) & 0xFF)
        for place in tl.static_range(CODES_A_WORD):
            values = mxfp4_nibble(words, scales, place)  # [LANES, GROUP]
            queries += (values,)  # type: ignore[assignment]
    return queries, weights


@triton.jit
def word_keys(
    key_ptrs,  # [WARPS]
    scale_ptrs,  # [WARPS]
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr = LANES,
    CODES_A_WORD: tl.constexpr = CODES_A_WORD,
    MXFP4_BLOCK: tl.constexpr = MXFP4_BLOCK,
):
    """Each lane's word of each key and its scale, `[LANES, WARPS, ROWS]` each, of keys
    of which ROWS in a row lie at each pointer."""
    BLOCKS: tl.constexpr = LANES * CODES_A_WORD // MXFP4_BLOCK
    lane_offs = tl.arange(0, LANES)[:, None, None]  # [LANES, 1, 1]
    row_offs = tl.arange(0, ROWS)[None, None, :]  # [1, 1, ROWS]
    # What is the same for all lanes comes last: it is then part of the load.
    word_ptrs = key_ptrs[None, :, None] + 4 * lane_offs + row_offs * (4 * LANES)
    words = tl.load(word_ptrs.to(tl.pointer_type(tl.int32)))  # [LANES, WARPS, ROWS]
    block_ptrs = scale_ptrs[None, :, None] + lane_offs * CODES_A_WORD // MXFP4_BLOCK
    exponents = tl.load(block_ptrs + row_offs * BLOCKS)  # [LANES, WARPS, ROWS]
    return words, exponent_scale(exponents.to(tl.int32))


@triton.jit
def word_scores(
    queries,  # BLOCK_H / GROUP * CODES_A_WORD times [LANES, GROUP] bf16
    weights,  # BLOCK_H / GROUP times [GROUP]
    words,  # [LANES, WARPS, ROWS] int32
    scales,  # [LANES, WARPS, ROWS]
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr = GROUP,
    LANES: tl.constexpr = LANES,
    CODES_A_WORD: tl.constexpr = CODES_A_WORD,
):
    """Weighted sum over all heads of relu(q . k), `[BLOCK_N]`.

    With all values of the keys before the first product the compiler spills 4 KB.
    """
    keys = ()
    sums = tl.zeros([BLOCK_N, GROUP], tl.float32)  # [BLOCK_N, GROUP]
    for group in tl.static_range(BLOCK_H // GROUP):
        products = tl.zeros([BLOCK_N, GROUP], tl.float32)  # [BLOCK_N, GROUP]
        for place in tl.static_range(CODES_A_WORD):
            if group == 0:
                # [LANES, WARPS, ROWS], then [BLOCK_N, LANES]
                values = mxfp4_nibble(words, scales, place)
                values = tl.reshape(tl.permute(values, (1, 2, 0)), (BLOCK_N, LANES))
                keys += (values,)  # type: ignore[assignment]
            query = queries[group * CODES_A_WORD + place]
            products = tl.dot(keys[place], query, products)
        factors = tl.broadcast_to(weights[group][None, :], products.shape)
        sums = tl.fma(tl.maximum(products, 0.0), factors, sums)  # [BLOCK_N, GROUP]
    return tl.sum(sums, axis=1)
