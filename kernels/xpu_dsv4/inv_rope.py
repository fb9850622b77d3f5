# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Inverse RoPE of the attention output, in bf16 or quantized for the grouped wo_a."""

import torch

from ._checks import check_range, check_same_device, check_shape, fail
from ._launch import launch_options
from ._pairs import (
    check_pair_rows,
    check_rotary,
    load_rotation,
    pack_bf16,
    rotate,
    unpack_bf16,
)
from ._triton import tl, triton
from ._ue8m0 import e4m3_code, e4m3_exponent, exponent_inverse, exponent_scale


@triton.jit
def _inv_rope_kernel(
    o_ptr,
    position_ptr,
    cos_sin_ptr,
    out_ptr,
    scale_ptr,
    num_tokens,
    num_heads,
    max_position,
    o_stride_token,
    o_stride_head,
    cos_sin_stride,
    scale_stride_group,
    scale_stride_token,
    scale_stride_block,
    HEADS_PER_GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF_ROPE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PACKED: tl.constexpr,
):
    BLOCKS: tl.constexpr = PAIRS // BLOCK_PAIRS
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, HEADS * BLOCKS)
    head = (tl.program_id(1) * HEADS + row // BLOCKS).to(tl.int64)
    group = head // HEADS_PER_GROUP
    block = (head % HEADS_PER_GROUP) * BLOCKS + row % BLOCKS
    exists = head < num_heads
    real = token < num_tokens
    pair = (row % BLOCKS)[:, None] * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = (exists & real)[:, None] & (pair >= 0)

    base = (o_ptr + token * o_stride_token).to(tl.pointer_type(tl.int32))
    words = head[:, None] * (o_stride_head // 2) + pair
    even, odd = unpack_bf16(tl.load(base + words, mask=mask, other=0))
    position = tl.load(position_ptr + token, mask=real, other=-1).to(tl.int64)
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
    even, odd = rotate(even, odd, cos, sin * -1.0, is_rope)

    width = HEADS_PER_GROUP * PAIRS
    out = (group * num_tokens + token) * width + (head % HEADS_PER_GROUP) * PAIRS
    out = out[:, None] + pair
    if QUANTIZE:
        amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
        exponent = e4m3_exponent(tl.maximum(amax, 1e-10))  # [HEADS * BLOCKS]
        inverse = exponent_inverse(exponent)[:, None]
        codes = e4m3_code(even * inverse) | (e4m3_code(odd * inverse) << 8)
        halves = out_ptr.to(tl.pointer_type(tl.int16))
        tl.store(halves + out, codes.to(tl.int16), mask=mask)
        address = group * scale_stride_group + token * scale_stride_token
        if PACKED:
            address = address * 4 + (block // 4) * scale_stride_block * 4 + block % 4
            byte = tl.where(real, exponent, 0).to(tl.uint8)
            tl.store(scale_ptr + address, byte, mask=exists)
        else:
            scale = tl.where(real, exponent_scale(exponent), 0.0)
            tl.store(scale_ptr + address + block * scale_stride_block, scale, exists)
    else:
        whole = out_ptr.to(tl.pointer_type(tl.int32))
        tl.store(whole + out, pack_bf16(even, odd), mask=mask)


def fused_inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
    quant_group_size: int = 128,
    tma_aligned_scales: bool = False,
    quantize: bool = True,
    *,
    row_major_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo the RoPE of the attention output and quantize it block by block. One launch.

    Interleaved rotation by minus the angle on the last `rope_dim` values in fp32, then
    e4m3 with the scale `2^ceil(log2(max(amax, 1e-10) / 448))` per `quant_group_size`.

    Args:
        o: attention output of shape `[T, n_groups * heads_per_group, nope_dim +
            rope_dim]`, bf16; may be strided.
        positions: of shape `[T]`, int64 or int32; outside the table nothing is rotated.
        cos_sin_cache: table of shape `[max_position, rope_dim]`, fp32 or bf16: cosines,
            then sines.
        n_groups: groups G of heads.
        heads_per_group: heads a group.
        nope_dim: leading values of a head that carry no position.
        rope_dim: trailing values of a head that do.
        quant_group_size: values a scale, a power of two.
        tma_aligned_scales: UE8M0 bytes, four an int32, instead of fp32 scales.
        quantize: false leaves bf16.
        row_major_scales: scales contiguous as `[G, T, blocks]`, as a batched FP8 matrix
            product wants them, instead of token-major columns padded to 4 tokens.

    Returns:
        (values, scales): values of shape `[T, G, D]`, D = heads_per_group * head size,
        with G outermost in memory; scales of shape `[T, G, D / quant_group_size]` fp32,
        or a quarter of the last size int32; empty without quantization. Padding tokens
        behind the scales are zero.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    head_dim = nope_dim + rope_dim
    heads = n_groups * heads_per_group
    check_shape("o", o, None, heads, head_dim)
    check_pair_rows("o", o)
    tokens = o.shape[0]
    if head_dim & (head_dim - 1):
        fail("nope_dim + rope_dim", head_dim, "a power of two")
    if rope_dim % 2:
        fail("rope_dim", rope_dim, "an even number")
    if quant_group_size & (quant_group_size - 1) or head_dim % quant_group_size:
        fail("quant_group_size", quant_group_size, f"a power of two up to {head_dim}")
    chunks = head_dim // quant_group_size
    if tma_aligned_scales and chunks % 4:
        fail("quant_group_size", quant_group_size, "4 scales a head, or a multiple")
    check_rotary(positions, cos_sin_cache, tokens, rope_dim)
    check_same_device(o=o, positions=positions, cos_sin_cache=cos_sin_cache)
    check_range("positions", positions, 0, cos_sin_cache.shape[0])

    device = o.device
    values = torch.empty(
        (n_groups, tokens, heads_per_group * head_dim),
        dtype=torch.float8_e4m3fn if quantize else torch.bfloat16,
        device=device,
    )
    blocks = heads_per_group * chunks // (4 if tma_aligned_scales else 1)
    scale_dtype = torch.int32 if tma_aligned_scales else torch.float32
    rows = tokens
    if not quantize:
        buffer = torch.empty((0, 0, 0), dtype=scale_dtype, device=device)
        scales = buffer
    elif row_major_scales:
        shape = (n_groups, tokens, blocks)
        buffer = torch.empty(shape, dtype=scale_dtype, device=device)
        scales = buffer
    else:
        rows = triton.cdiv(tokens, 4) * 4
        shape = (n_groups, blocks, rows)
        buffer = torch.empty(shape, dtype=scale_dtype, device=device)
        scales = buffer.transpose(1, 2)[:, :tokens]
    if tokens and heads:
        tile = 4
        _inv_rope_kernel[(rows, triton.cdiv(heads, tile))](
            o,
            positions,
            cos_sin_cache,
            values.view(torch.uint8) if quantize else values,
            buffer.view(torch.uint8) if tma_aligned_scales else buffer,
            tokens,
            heads,
            cos_sin_cache.shape[0],
            o.stride(0),
            o.stride(1),
            cos_sin_cache.stride(0),
            *scales.stride(),
            HEADS_PER_GROUP=heads_per_group,
            PAIRS=head_dim // 2,
            HALF_ROPE=rope_dim // 2,
            BLOCK_PAIRS=quant_group_size // 2,
            HEADS=tile,
            QUANTIZE=quantize,
            PACKED=tma_aligned_scales,
            **launch_options(device, num_warps=4),
        )
    return values.transpose(0, 1), scales.transpose(0, 1)


def inv_rope_bf16(
    attn_output: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
) -> torch.Tensor:
    """Undo the RoPE of the attention output and regroup its heads, in bf16. One launch.

    Args:
        attn_output: of shape `[T, n_groups * heads_per_group, nope_dim + rope_dim]`,
            bf16; may be strided.
        positions: of shape `[T]`, int64 or int32; outside the table nothing is rotated.
        cos_sin_cache: table of shape `[max_position, rope_dim]`, fp32 or bf16.
        n_groups: groups G of heads.
        heads_per_group: heads a group.
        nope_dim: leading values of a head that carry no position.
        rope_dim: trailing values of a head that do.

    Returns:
        bf16 of shape `[T, G, heads_per_group * head size]` with G outermost in memory,
        so that `.transpose(0, 1)` is the contiguous operand of a batched product.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    values, _ = fused_inv_rope_fp8_quant(
        attn_output,
        positions,
        cos_sin_cache,
        n_groups,
        heads_per_group,
        nope_dim,
        rope_dim,
        quantize=False,
    )
    return values
