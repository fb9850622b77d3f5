# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Indexer queries: RoPE, FP8 or MXFP4 quantization and the head weights, in one."""

import torch

from ._checks import check_dtype, check_range, check_same_device, check_shape, fail
from ._fp4 import MXFP4_BLOCK
from ._launch import launch_options
from ._pairs import check_pair_rows, check_rotary, load_rotation, rotate, unpack_bf16
from ._triton import tl, triton
from ._ue8m0 import (
    e2m1_code,
    e2m1_exponent,
    e4m3_code,
    e4m3_exponent,
    exponent_inverse,
    exponent_scale,
)


@triton.jit
def _indexer_q_kernel(
    q_ptr,
    position_ptr,
    cos_sin_ptr,
    weight_ptr,
    code_ptr,
    scale_ptr,
    weight_out_ptr,
    softmax_scale,
    head_scale,
    num_heads,
    max_position,
    q_stride_token,
    q_stride_head,
    cos_sin_stride,
    weight_stride,
    PAIRS: tl.constexpr,
    HALF_ROPE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    FP4: tl.constexpr,
):
    BLOCKS: tl.constexpr = PAIRS // BLOCK_PAIRS
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    row = tl.arange(0, HEADS * BLOCKS)
    head = (first + row // BLOCKS).to(tl.int64)
    pair = (row % BLOCKS)[:, None] * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = (head[:, None] < num_heads) & (pair >= 0)

    base = (q_ptr + token * q_stride_token).to(tl.pointer_type(tl.int32))
    words = head[:, None] * (q_stride_head // 2) + pair
    even, odd = unpack_bf16(tl.load(base + words, mask=mask, other=0))
    position = tl.load(position_ptr + token).to(tl.int64)
    is_rope = pair >= PAIRS - HALF_ROPE
    cos, sin = load_rotation(
        cos_sin_ptr,
        cos_sin_stride,
        position,
        max_position,
        pair - (PAIRS - HALF_ROPE),
        is_rope,
        HALF_ROPE,
    )
    even, odd = rotate(even, odd, cos, sin, is_rope)
    even = even.to(tl.bfloat16).to(tl.float32)
    odd = odd.to(tl.bfloat16).to(tl.float32)
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)  # [HEADS * BLOCKS]

    out = token * num_heads + head
    if FP4:
        exponent = e2m1_exponent(tl.maximum(amax, 6.0 * 2.0**-126))
        inverse = exponent_inverse(exponent)[:, None]
        codes = e2m1_code(even * inverse) | (e2m1_code(odd * inverse) << 4)
        tl.store(code_ptr + out[:, None] * PAIRS + pair, codes.to(tl.uint8), mask=mask)
        tl.store(
            scale_ptr + out * BLOCKS + row % BLOCKS,
            exponent.to(tl.uint8),
            mask=head < num_heads,
        )
        factor = tl.full((HEADS * BLOCKS,), 1.0, tl.float32)
    else:
        exponent = e4m3_exponent(tl.maximum(amax, 1e-4))
        inverse = exponent_inverse(exponent)[:, None]
        codes = e4m3_code(even * inverse) | (e4m3_code(odd * inverse) << 8)
        halves = code_ptr.to(tl.pointer_type(tl.int16))
        tl.store(halves + out[:, None] * PAIRS + pair, codes.to(tl.int16), mask=mask)
        factor = exponent_scale(exponent)

    leads = (head < num_heads) & (row % BLOCKS == 0)
    weight = tl.load(weight_ptr + token * weight_stride + head, mask=leads, other=0.0)
    weight = weight.to(tl.float32) * factor * softmax_scale * head_scale
    tl.store(weight_out_ptr + out, weight, mask=leads)


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

    Interleaved RoPE on the last R values in fp32, rounded to bf16, then
    FP8: one scale `2^ceil(log2(max(amax, 1e-4) / 448))` a head, folded into the weight;
    MXFP4: one scale `2^ceil(log2(max(amax, 6 * 2^-126) / 6))` per 32 values, kept
    beside the values, so that the weight does not carry it.

    Args:
        positions: of shape `[T]`, int64 or int32; outside the table nothing is rotated.
        index_q: queries of shape `[T, H, D]`, bf16; may be strided. D is a power of
            two, and a multiple of 128 for MXFP4.
        index_q_cos_sin_cache: table of shape `[max_position, R]`, fp32 or bf16: R/2
            cosines, then R/2 sines.
        index_weights: of shape `[T, H]`, bf16 or fp32.
        index_weights_softmax_scale: factor of every weight.
        index_weights_head_scale: another factor of every weight.
        use_fp4: MXFP4 instead of FP8.

    Returns:
        (queries, weights): queries are `[T, H, D]` float8_e4m3fn or, for MXFP4, a pair
        of `[T, H, D/2]` uint8 (the even value in the low nibble) and the UE8M0 bytes as
        int32, `[T, H]` at D = 128, else `[T, H, D/128]`; weights are `[T, H]` fp32,
        `w * softmax_scale * head_scale`, for FP8 also times the query's scale.

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
    check_range("positions", positions, 0, index_q_cos_sin_cache.shape[0])

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
        tile = 8
        _indexer_q_kernel[(tokens, triton.cdiv(heads, tile))](
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
            BLOCK_PAIRS=block // 2,
            HEADS=tile,
            FP4=use_fp4,
            **launch_options(device, num_warps=2),
        )
    if use_fp4:
        return (codes, scales.view(torch.int32).squeeze(-1)), weights
    return codes, weights
