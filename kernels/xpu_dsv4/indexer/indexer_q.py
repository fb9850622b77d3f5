# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Indexer queries: RoPE, FP8 or MXFP4 quantization and the head weights, fused."""

import torch

from .._checks import check_dtype, check_same_device, check_shape, fail
from .._fp4 import MXFP4_BLOCK
from .._launch import cdiv, launch_options
from .._pairs import (
    check_pair_rows,
    check_rotary,
    load_rotation,
    rotate,
    round_to_bf16,
    unpack_bf16,
)
from .._triton import tl, triton
from .._ue8m0 import (
    e2m1_code,
    e2m1_exponent,
    e4m3_code,
    e4m3_exponent,
    exponent_inverse,
    exponent_scale,
)

MIN_AMAX_FP8 = 1e-4
"""Least absolute maximum assumed of an FP8 block, as in the KV pages."""
MIN_AMAX_FP4 = 6.0 * 2.0**-126
"""The same of an MXFP4 block: its scale is the smallest normal fp32 value."""


@triton.jit
def _indexer_q_kernel(
    q_ptr,
    positions_ptr,
    cos_sin_ptr,
    weights_ptr,
    codes_ptr,
    scales_ptr,
    weights_out_ptr,
    softmax_scale,
    head_scale,
    num_heads,
    max_position,
    q_token_stride,
    q_head_stride,
    cos_sin_stride,
    weights_stride,
    PAIRS: tl.constexpr,
    HALF_ROPE: tl.constexpr,
    PAIRS_PER_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP4: tl.constexpr,
    MIN_AMAX_FP8: tl.constexpr = MIN_AMAX_FP8,
    MIN_AMAX_FP4: tl.constexpr = MIN_AMAX_FP4,
):
    """BLOCK_H heads of one token, as rows of values that share a scale."""
    SCALES: tl.constexpr = PAIRS // PAIRS_PER_SCALE
    ROWS: tl.constexpr = BLOCK_H * SCALES
    NOPE_PAIRS: tl.constexpr = PAIRS - HALF_ROPE
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_H
    row_offs = tl.arange(0, ROWS)  # [ROWS]
    head_offs = (first_head + row_offs // SCALES).to(tl.int64)  # [ROWS]
    first_offs = (row_offs % SCALES)[:, None] * PAIRS_PER_SCALE  # [ROWS, 1]
    # [ROWS, PAIRS_PER_SCALE]
    pair_offs = first_offs + tl.arange(0, PAIRS_PER_SCALE)[None, :]
    row_mask = head_offs[:, None] < num_heads  # [ROWS, 1]

    words_ptr = (q_ptr + token * q_token_stride).to(tl.pointer_type(tl.int32))
    # [ROWS, PAIRS_PER_SCALE]
    word_offs = head_offs[:, None] * (q_head_stride // 2) + pair_offs
    # [ROWS, PAIRS_PER_SCALE]
    words = tl.load(words_ptr + word_offs, mask=row_mask, other=0)
    even, odd = unpack_bf16(words)  # [ROWS, PAIRS_PER_SCALE] each
    position = tl.load(positions_ptr + token).to(tl.int64)
    rope_mask = pair_offs >= NOPE_PAIRS  # [ROWS, PAIRS_PER_SCALE]
    # [ROWS, PAIRS_PER_SCALE] each
    cos, sin = load_rotation(
        cos_sin_ptr,
        cos_sin_stride,
        position,
        max_position,
        pair_offs - NOPE_PAIRS,
        rope_mask,
        HALF_ROPE,
    )
    even, odd = rotate(even, odd, cos, sin, rope_mask)
    even = round_to_bf16(even)
    odd = round_to_bf16(odd)
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)  # [ROWS]

    out_offs = token * num_heads + head_offs  # [ROWS]
    if FP4:
        exponents = e2m1_exponent(tl.maximum(amax, MIN_AMAX_FP4))  # [ROWS]
        inverses = exponent_inverse(exponents)[:, None]  # [ROWS, 1]
        # [ROWS, PAIRS_PER_SCALE]
        codes = e2m1_code(even * inverses) | (e2m1_code(odd * inverses) << 4)
        tl.store(
            codes_ptr + out_offs[:, None] * PAIRS + pair_offs,
            codes.to(tl.uint8),
            mask=row_mask,
        )
        tl.store(
            scales_ptr + out_offs * SCALES + row_offs % SCALES,
            exponents.to(tl.uint8),
            mask=head_offs < num_heads,
        )
        factors = tl.full((ROWS,), 1.0, tl.float32)  # [ROWS]
    else:
        exponents = e4m3_exponent(tl.maximum(amax, MIN_AMAX_FP8))  # [ROWS]
        inverses = exponent_inverse(exponents)[:, None]  # [ROWS, 1]
        # [ROWS, PAIRS_PER_SCALE]
        codes = e4m3_code(even * inverses) | (e4m3_code(odd * inverses) << 8)
        code_pairs_ptr = codes_ptr.to(tl.pointer_type(tl.int16))
        tl.store(
            code_pairs_ptr + out_offs[:, None] * PAIRS + pair_offs,
            codes.to(tl.int16),
            mask=row_mask,
        )
        factors = exponent_scale(exponents)  # [ROWS]

    weight_mask = (head_offs < num_heads) & (row_offs % SCALES == 0)  # [ROWS]
    # [ROWS]
    weights = tl.load(
        weights_ptr + token * weights_stride + head_offs, mask=weight_mask, other=0.0
    )
    scaled = weights.to(tl.float32) * factors * softmax_scale * head_scale  # [ROWS]
    tl.store(weights_out_ptr + out_offs, scaled, mask=weight_mask)


def fused_indexer_q_rope_quant(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    use_fp4: bool = False,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rotate and quantize indexer queries and scale their head weights. One launch.

    The last R values are rotated by interleaved RoPE in fp32, and the query is rounded
    to bf16. Then it is quantized:

    - FP8 has one scale per head, `2^ceil(log2(max(amax, 1e-4) / 448))`, which is
      multiplied into the head's weight;
    - MXFP4 has one scale per 32 values, `2^ceil(log2(max(amax, 6 * 2^-126) / 6))`,
      which is returned beside the values.

    Args:
        positions (torch.Tensor):
            Position of each token, of shape `[T]`, int64 or int32. A position outside
            the table leaves the token unrotated.
        index_q (torch.Tensor):
            Queries of shape `[T, H, D]`, bf16; may be strided. D is a power of two, and
            a multiple of 128 for MXFP4.
        index_q_cos_sin_cache (torch.Tensor):
            Table of shape `[max_position, R]`, fp32 or bf16: R/2 cosines, then R/2
            sines.
        index_weights (torch.Tensor):
            Weight of each head, of shape `[T, H]`, bf16 or fp32.
        index_weights_softmax_scale (float):
            Factor of every weight.
        index_weights_head_scale (float):
            Another factor of every weight.
        use_fp4 (bool):
            Quantize to MXFP4 instead of FP8.

    Returns:
        (queries, weights): queries of shape `[T, H, D]`, float8_e4m3fn. For MXFP4 they
        are a pair: codes of shape `[T, H, D/2]`, uint8, the even value in the low
        nibble, and UE8M0 bytes as int32 words, of shape `[T, H]` if D = 128, else
        `[T, H, D/128]`. Weights are of shape `[T, H]`, fp32: `w * softmax_scale *
        head_scale`, for FP8 also times the query's scale.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_shape("index_q", index_q, None, None, None)
    check_pair_rows("index_q", index_q)
    tokens, heads, dim = index_q.shape
    multiple = 4 * MXFP4_BLOCK if use_fp4 else 4
    if dim & (dim - 1) or dim % multiple:
        fail("index_q.shape[2]", dim, f"a power of two and multiple of {multiple}")
    rope_dim = index_q_cos_sin_cache.shape[-1]
    if rope_dim > dim or rope_dim % 2:
        fail("index_q_cos_sin_cache.shape[-1]", rope_dim, f"even and at most {dim}")
    check_rotary(positions, index_q_cos_sin_cache, tokens, rope_dim)
    check_shape("index_weights", index_weights, tokens, heads)
    check_dtype("index_weights", index_weights, torch.bfloat16, torch.float32)
    if heads > 1 and index_weights.stride(1) != 1:
        fail("index_weights.stride(1)", index_weights.stride(1), "1")
    check_same_device(
        index_q=index_q,
        positions=positions,
        index_q_cos_sin_cache=index_q_cos_sin_cache,
        index_weights=index_weights,
    )

    device = index_q.device
    if use_fp4:
        block = MXFP4_BLOCK
        codes = torch.empty((tokens, heads, dim // 2), dtype=torch.uint8, device=device)
        scales = torch.empty(
            (tokens, heads, dim // block), dtype=torch.uint8, device=device
        )
    else:
        block = dim
        codes = torch.empty(
            (tokens, heads, dim), dtype=torch.float8_e4m3fn, device=device
        )
        scales = codes
    weights = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    if tokens and heads:
        block_h = 8
        _indexer_q_kernel[(tokens, cdiv(heads, block_h))](
            index_q,
            positions,
            index_q_cos_sin_cache,
            index_weights,
            codes.view(torch.uint8),
            scales.view(torch.uint8),
            weights,
            index_weights_softmax_scale,
            index_weights_head_scale,
            heads,
            index_q_cos_sin_cache.shape[0],
            index_q.stride(0),
            index_q.stride(1),
            index_q_cos_sin_cache.stride(0),
            index_weights.stride(0),
            PAIRS=dim // 2,
            HALF_ROPE=rope_dim // 2,
            PAIRS_PER_SCALE=block // 2,
            BLOCK_H=block_h,
            FP4=use_fp4,
            **launch_options(device, num_warps=2),
        )
    if use_fp4:
        return (codes, scales.view(torch.int32).squeeze(-1)), weights
    return codes, weights
