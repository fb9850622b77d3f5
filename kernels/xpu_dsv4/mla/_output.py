# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What attention writes: bf16 rows, or what the grouped FP8 product of `wo_a` takes.

For the product RoPE is undone, then each block of 128 values of a head becomes e4m3
with one scale. Attention that ends so needs no launch behind it, and moves a byte for
each value where bf16 rows, written and read again, take five.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._checks import check_dtype, check_inner_contiguous, check_shape, fail
from .._pages import HEAD_DIM, NOPE_DIM, ROPE_DIM
from .._pairs import check_rotary, load_rotation, rotate, round_to_bf16
from .._triton import tl, triton
from .._ue8m0 import e4m3_code, e4m3_exponent, exponent_inverse, exponent_scale

QUANT_GROUP = 128
"""Values per scale."""
MIN_AMAX = 1e-10
"""Least absolute maximum assumed of a quantization block."""


@dataclass(frozen=True, slots=True)
class Fp8Output:
    """Where attention writes the operands of `wo_a`'s product, and what it needs.

    Indexed by a slice of tokens, as a bf16 output is.

    Attributes:
        values: rows of shape `[G, T, D]`, float8_e4m3fn: G groups of heads, D = heads
            per group * 512. All tokens of a group follow each other in memory.
        scales: scales of shape `[G, T, D / 128]`, fp32, laid out alike.
        positions: position of each token, of shape `[T]`, int64 or int32. A position
            outside the table leaves the token unrotated.
        cos_sin_cache: table of shape `[max_position, 64]`, fp32 or bf16: cosines, then
            sines.

    """

    values: torch.Tensor
    scales: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor

    def __getitem__(self, tokens: slice) -> "Fp8Output":
        return Fp8Output(
            self.values[:, tokens],
            self.scales[:, tokens],
            self.positions[tokens],
            self.cos_sin_cache,
        )

    @property
    def heads_per_group(self) -> int:
        """Heads that one row of `values` holds."""
        return self.values.shape[2] // HEAD_DIM

    @property
    def group_tokens(self) -> int:
        """Tokens between two groups, which are more than T in a slice."""
        return self.values.stride(0) // self.values.shape[2]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of its tensors, in the order of the attributes."""
        return self.values, self.scales, self.positions, self.cos_sin_cache


def tensors_of(out: torch.Tensor | Fp8Output | None) -> tuple[torch.Tensor | None, ...]:
    """What `check_output` takes: the output, then its scales, positions and table,
    which are None for bf16."""
    if isinstance(out, Fp8Output):
        return out.tensors
    return out, None, None, None


def check_output(
    num_tokens: int,
    num_heads: int,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
) -> None:
    """Raise unless `out` holds `num_heads` heads of `num_tokens` tokens.

    Without `scales` it is bf16, and the others are not looked at.
    """
    if scales is None:
        check_dtype("out", out, torch.bfloat16)
        check_shape("out", out, num_tokens, num_heads, HEAD_DIM)
        check_inner_contiguous("out", out)
        return
    check_dtype("out.values", out, torch.float8_e4m3fn)
    check_shape("out.values", out, None, num_tokens, None)
    groups, _, width = out.shape
    if width % HEAD_DIM or groups * width != num_heads * HEAD_DIM:
        want = f"[G, {num_tokens}, D] of {num_heads} heads of {HEAD_DIM} values"
        fail("out.values.shape", list(out.shape), want)
    blocks = width // QUANT_GROUP
    check_dtype("out.scales", scales, torch.float32)
    check_shape("out.scales", scales, groups, num_tokens, blocks)
    group_tokens = out.stride(0) // width
    for name, tensor in (("out.values", out), ("out.scales", scales)):
        row = tensor.shape[2]
        strides = (group_tokens * row, row, 1)
        if num_tokens and tensor.stride() != strides:
            fail(f"{name}.stride()", tensor.stride(), str(strides))
    if out.data_ptr() % 2:
        fail("out.values.data_ptr()", out.data_ptr(), "an even address")
    assert positions is not None and cos_sin_cache is not None
    check_rotary(positions, cos_sin_cache, num_tokens, ROPE_DIM)


class OutputArguments(NamedTuple):
    """A kernel's arguments for its output.

    None stands for what a form does not need. Triton compiles no argument for it, which
    on Intel GPUs would take registers that the loop over keys lacks.

    Attributes:
        pointer: `out_ptr`.
        strides: `out_token_stride` and `out_head_stride`, for bf16.
        operands: the arguments from `scales_ptr` to `cos_sin_stride`, for FP8.

    """

    pointer: torch.Tensor
    strides: tuple[int | None, int | None]
    operands: tuple[torch.Tensor | int | None, ...]


def output_arguments(out: torch.Tensor | Fp8Output) -> OutputArguments:
    """How a kernel gets attention of shape `[T, H, 512]`, bf16, or its operands."""
    if isinstance(out, torch.Tensor):
        return OutputArguments(out, (out.stride(0), out.stride(1)), (None,) * 6)
    values, scales, positions, cos_sin_cache = out.tensors
    operands = (
        scales,
        positions,
        cos_sin_cache,
        out.group_tokens,
        cos_sin_cache.shape[0],
        cos_sin_cache.stride(0),
    )
    return OutputArguments(values.view(torch.uint8), (None, None), operands)


def heads_per_group(out: torch.Tensor | Fp8Output) -> int:
    """A kernel's constant HEADS_PER_GROUP, which is 0 where `out` is bf16."""
    return 0 if isinstance(out, torch.Tensor) else out.heads_per_group


@triton.jit
def block_scale(amax, MIN_AMAX: tl.constexpr = MIN_AMAX):
    """The biased exponent of a block's scale, and 1 / scale; element-wise."""
    exponent = e4m3_exponent(tl.maximum(amax, MIN_AMAX))
    return exponent, exponent_inverse(exponent)


@triton.jit
def store_fp8_blocks(
    even,  # [ROWS, BLOCK_PAIRS] fp32
    odd,  # [ROWS, BLOCK_PAIRS] fp32
    values_ptr,
    scales_ptr,
    block_offs,  # [ROWS]
    row_mask,  # [ROWS]
    BLOCK_PAIRS: tl.constexpr,
):
    """Quantize blocks of values, given as pairs, and store them with their scales."""
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)  # [ROWS]
    exponents, inverses = block_scale(amax)  # [ROWS] each
    inverses = inverses[:, None]  # [ROWS, 1]
    # [ROWS, BLOCK_PAIRS]
    codes = e4m3_code(even * inverses) | (e4m3_code(odd * inverses) << 8)
    pair_offs = block_offs[:, None] * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)[None, :]
    code_pairs_ptr = values_ptr.to(tl.pointer_type(tl.int16))
    tl.store(code_pairs_ptr + pair_offs, codes.to(tl.int16), mask=row_mask[:, None])
    tl.store(scales_ptr + block_offs, exponent_scale(exponents), mask=row_mask)


@triton.jit
def first_blocks(
    head_offs,
    token,
    group_tokens,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr = HEAD_DIM // QUANT_GROUP,
):
    """Where the blocks of `head_offs` begin, in blocks; element-wise, int64."""
    heads = head_offs.to(tl.int64)
    rows = heads // HEADS_PER_GROUP * group_tokens + token
    return (rows * HEADS_PER_GROUP + heads % HEADS_PER_GROUP) * HEAD_BLOCKS


@triton.jit
def rotate_back(
    even,
    odd,
    pair,
    in_rope,
    token,
    positions_ptr,
    cos_sin_ptr,
    max_position,
    cos_sin_stride,
    HALF_ROPE: tl.constexpr = ROPE_DIM // 2,
):
    """Pairs of a token rotated back where `in_rope` is true; element-wise.

    `pair` is their number in the rotary part.
    """
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos, sin = load_rotation(
        cos_sin_ptr, cos_sin_stride, position, max_position, pair, in_rope, HALF_ROPE
    )
    # sin * -1.0 and not -sin, which Triton 3.6 makes 0 - sin: the sign of 0 would flip.
    return rotate(even, odd, cos, sin * -1.0, in_rope)


@triton.jit
def store_heads(
    x,  # [BLOCK_H, DIMS] fp32
    head_offs,  # [BLOCK_H]
    head_mask,  # [BLOCK_H]
    first_dim,
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
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIMS: tl.constexpr,
    QUANT_GROUP: tl.constexpr = QUANT_GROUP,
    NOPE_PAIRS: tl.constexpr = NOPE_DIM // 2,
):
    """Store DIMS dims of the attention of a block of heads, from `first_dim` on.

    FP8 is made of values rounded to bf16, as by a launch of its own that reads them.
    """
    if HEADS_PER_GROUP:
        BLOCKS: tl.constexpr = DIMS // QUANT_GROUP
        BLOCK_PAIRS: tl.constexpr = QUANT_GROUP // 2
        ROWS: tl.constexpr = BLOCK_H * BLOCKS
        pairs = tl.reshape(round_to_bf16(x), [ROWS, BLOCK_PAIRS, 2])
        even, odd = tl.split(pairs)  # [ROWS, BLOCK_PAIRS] each
        blocks = first_dim // QUANT_GROUP + tl.arange(0, BLOCKS)[None, :]  # [1, BLOCKS]
        head_blocks = first_blocks(head_offs, token, group_tokens, HEADS_PER_GROUP)
        block_offs = tl.reshape(head_blocks[:, None] + blocks, [ROWS])  # [ROWS]
        # [BLOCK_H, BLOCKS]
        row_mask = tl.broadcast_to(head_mask[:, None], [BLOCK_H, BLOCKS])
        in_head = tl.reshape(
            tl.broadcast_to(blocks, [BLOCK_H, BLOCKS]), [ROWS]
        )  # [ROWS]
        # [ROWS, BLOCK_PAIRS]
        pair_offs = in_head[:, None] * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)[None, :]
        # [ROWS, BLOCK_PAIRS] each
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
        )
        store_fp8_blocks(
            even,
            odd,
            out_ptr,
            scales_ptr,
            block_offs,
            tl.reshape(row_mask, [ROWS]),
            BLOCK_PAIRS,
        )
    else:
        # [BLOCK_H, 1]
        out_row_ptrs = (
            out_ptr
            + token * out_token_stride
            + head_offs.to(tl.int64)[:, None] * out_head_stride
        )
        dim_offs = first_dim + tl.arange(0, DIMS)  # [DIMS]
        tl.store(
            out_row_ptrs + dim_offs[None, :], x.to(tl.bfloat16), mask=head_mask[:, None]
        )
