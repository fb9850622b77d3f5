# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Inverse RoPE of the attention output, in bf16 or quantized for the grouped `wo_a`."""

import torch

from .._checks import check_once, check_same_device, check_shape, fail
from .._launch import cdiv, launch_options
from .._pages import NOPE_DIM, ROPE_DIM
from .._pairs import (
    check_pair_rows,
    check_rotary,
    pack_bf16,
    unpack_bf16,
)
from .._triton import tl, triton
from ._output import QUANT_GROUP, rotate_back, store_fp8_blocks


@triton.jit(do_not_specialize=["num_tokens"])
def _inv_rope_kernel(
    o_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_ptr,
    scales_ptr,
    num_tokens,
    num_heads,
    max_position,
    o_token_stride,
    o_head_stride,
    cos_sin_stride,
    HEADS_PER_GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF_ROPE: tl.constexpr,
    PAIRS_PER_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """BLOCK_H heads of one token, as rows of values that share a scale."""
    SCALES: tl.constexpr = PAIRS // PAIRS_PER_SCALE
    ROWS: tl.constexpr = BLOCK_H * SCALES
    NOPE_PAIRS: tl.constexpr = PAIRS - HALF_ROPE
    token = tl.program_id(0).to(tl.int64)
    row_offs = tl.arange(0, ROWS)  # [ROWS]
    head_offs = (tl.program_id(1) * BLOCK_H + row_offs // SCALES).to(tl.int64)  # [ROWS]
    group_offs = head_offs // HEADS_PER_GROUP  # [ROWS]
    block_offs = (head_offs % HEADS_PER_GROUP) * SCALES + row_offs % SCALES  # [ROWS]
    head_mask = head_offs < num_heads  # [ROWS]
    first_offs = (row_offs % SCALES)[:, None] * PAIRS_PER_SCALE  # [ROWS, 1]
    # [ROWS, PAIRS_PER_SCALE]
    pair_offs = first_offs + tl.arange(0, PAIRS_PER_SCALE)[None, :]
    row_mask = head_mask[:, None]  # [ROWS, 1]

    words_ptr = (o_ptr + token * o_token_stride).to(tl.pointer_type(tl.int32))
    # [ROWS, PAIRS_PER_SCALE]
    word_offs = head_offs[:, None] * (o_head_stride // 2) + pair_offs
    # [ROWS, PAIRS_PER_SCALE]
    words = tl.load(words_ptr + word_offs, mask=row_mask, other=0)
    even, odd = unpack_bf16(words)  # [ROWS, PAIRS_PER_SCALE] each
    # [ROWS, PAIRS_PER_SCALE] each
    even, odd = rotate_back(
        even,
        odd,
        pair_offs - NOPE_PAIRS,
        pair_offs >= NOPE_PAIRS,
        token,
        positions_ptr,
        cos_sin_ptr,
        max_position,
        cos_sin_stride,
        HALF_ROPE,
    )
    if QUANTIZE:
        GROUP_BLOCKS: tl.constexpr = HEADS_PER_GROUP * SCALES
        store_fp8_blocks(
            even,
            odd,
            out_ptr,
            scales_ptr,
            (group_offs * num_tokens + token) * GROUP_BLOCKS + block_offs,
            head_mask,
            PAIRS_PER_SCALE,
        )
    else:
        GROUP_PAIRS: tl.constexpr = HEADS_PER_GROUP * PAIRS
        token_out_offs = (group_offs * num_tokens + token) * GROUP_PAIRS  # [ROWS]
        head_out_offs = token_out_offs + (head_offs % HEADS_PER_GROUP) * PAIRS  # [ROWS]
        out_offs = head_out_offs[:, None] + pair_offs  # [ROWS, PAIRS_PER_SCALE]
        pairs_ptr = out_ptr.to(tl.pointer_type(tl.int32))
        tl.store(pairs_ptr + out_offs, pack_bf16(even, odd), mask=row_mask)


def inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = NOPE_DIM,
    rope_dim: int = ROPE_DIM,
    quant_group_size: int = QUANT_GROUP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo the RoPE of the attention output and quantize it block by block. One launch.

    The last `rope_dim` values are rotated by minus the angle, interleaved, in fp32.
    Then each `quant_group_size` values become e4m3 with one scale,
    `2^ceil(log2(max(amax, 1e-10) / 448))`.

    Args:
        o (torch.Tensor):
            Attention output of shape `[T, n_groups * heads_per_group, nope_dim +
            rope_dim]`, bf16; may be strided.
        positions (torch.Tensor):
            Position of each token, of shape `[T]`, int64 or int32. A position outside
            the table leaves the token unrotated.
        cos_sin_cache (torch.Tensor):
            Table of shape `[max_position, rope_dim]`, fp32 or bf16: cosines, then
            sines.
        n_groups (int):
            Groups G of heads.
        heads_per_group (int):
            Heads per group.
        nope_dim (int):
            Leading values of a head, which carry no position.
        rope_dim (int):
            Trailing values of a head, which do.
        quant_group_size (int):
            Values per scale, a power of two.

    Returns:
        (values, scales): values of shape `[T, G, D]`, D = heads_per_group * (nope_dim +
        rope_dim), float8_e4m3fn, and scales of shape `[T, G, D / quant_group_size]`,
        fp32. Both have G outermost in memory: `.transpose(0, 1)` gives the contiguous
        operands of a batched FP8 product.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    sizes = (n_groups, heads_per_group, nope_dim, rope_dim, quant_group_size)
    values, scales = _undo(o, positions, cos_sin_cache, *sizes, quantize=True)
    assert scales is not None
    return values.transpose(0, 1), scales.transpose(0, 1)


def inv_rope_bf16(
    attn_output: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = NOPE_DIM,
    rope_dim: int = ROPE_DIM,
) -> torch.Tensor:
    """Undo the RoPE of the attention output and regroup its heads, in bf16. One launch.

    Args:
        attn_output (torch.Tensor):
            Attention output of shape `[T, n_groups * heads_per_group, nope_dim +
            rope_dim]`, bf16; may be strided.
        positions (torch.Tensor):
            Position of each token, of shape `[T]`, int64 or int32. A position outside
            the table leaves the token unrotated.
        cos_sin_cache (torch.Tensor):
            Table of shape `[max_position, rope_dim]`, fp32 or bf16: cosines, then
            sines.
        n_groups (int):
            Groups G of heads.
        heads_per_group (int):
            Heads per group.
        nope_dim (int):
            Leading values of a head, which carry no position.
        rope_dim (int):
            Trailing values of a head, which do.

    Returns:
        Values of shape `[T, G, D]`, D = heads_per_group * (nope_dim + rope_dim), bf16,
        with G outermost in memory: `.transpose(0, 1)` is the contiguous operand of a
        batched product.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    sizes = (n_groups, heads_per_group, nope_dim, rope_dim, QUANT_GROUP)
    values, _ = _undo(attn_output, positions, cos_sin_cache, *sizes, quantize=False)
    return values.transpose(0, 1)


def _undo(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
    quant_group_size: int,
    *,
    quantize: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values `[G, T, D]` and, if they are quantized, scales `[G, T, D / size]`."""
    heads = n_groups * heads_per_group
    check_once(
        _check, o, positions, cos_sin_cache, heads, nope_dim, rope_dim, quant_group_size
    )
    tokens = o.shape[0]
    width = heads_per_group * (nope_dim + rope_dim)
    values = torch.empty(
        (n_groups, tokens, width),
        dtype=torch.float8_e4m3fn if quantize else torch.bfloat16,
        device=o.device,
    )
    scales = None
    if quantize:
        scales = torch.empty(
            (n_groups, tokens, width // quant_group_size),
            dtype=torch.float32,
            device=o.device,
        )
    if tokens and heads:
        block_h = 4
        _inv_rope_kernel[(tokens, cdiv(heads, block_h))](
            o,
            positions,
            cos_sin_cache,
            values.view(torch.uint8) if quantize else values,
            scales,
            tokens,
            heads,
            cos_sin_cache.shape[0],
            o.stride(0),
            o.stride(1),
            cos_sin_cache.stride(0),
            HEADS_PER_GROUP=heads_per_group,
            PAIRS=(nope_dim + rope_dim) // 2,
            HALF_ROPE=rope_dim // 2,
            PAIRS_PER_SCALE=quant_group_size // 2,
            BLOCK_H=block_h,
            QUANTIZE=quantize,
            **launch_options(o.device, num_warps=4),
        )
    return values, scales


def _check(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    heads: int,
    nope_dim: int,
    rope_dim: int,
    quant_group_size: int,
) -> None:
    """Raise unless the arguments of `inv_rope_fp8_quant` fit together."""
    head_dim = nope_dim + rope_dim
    check_shape("o", o, None, heads, head_dim)
    check_pair_rows("o", o)
    if head_dim & (head_dim - 1):
        fail("nope_dim + rope_dim", head_dim, "a power of two")
    if rope_dim % 2:
        fail("rope_dim", rope_dim, "an even number")
    if quant_group_size & (quant_group_size - 1) or head_dim % quant_group_size:
        fail("quant_group_size", quant_group_size, f"a power of two up to {head_dim}")
    check_rotary(positions, cos_sin_cache, o.shape[0], rope_dim)
    check_same_device(o=o, positions=positions, cos_sin_cache=cos_sin_cache)
