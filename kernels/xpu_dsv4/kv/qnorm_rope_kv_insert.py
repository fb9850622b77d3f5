# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Query norm and RoPE, and the KV row's RoPE, quantization and page insert, fused.

A program owns either some heads of one token's query, or that token's KV row. The
rotated row goes from registers to its page and is never stored elsewhere.
"""

import torch

from .._checks import check_once, check_same_device, check_shape, fail
from .._launch import cdiv, launch_options
from .._pages import HEAD_DIM, NOPE_DIM, ROPE_DIM, check_page_cache
from .._pairs import (
    check_pair_rows,
    check_rotary,
    load_rotation,
    pack_bf16,
    rotate,
    unpack_bf16,
)
from .._triton import tl, triton
from ._kv_quant import check_slots, insert_row, row_words


@triton.jit(do_not_specialize=["num_slot_tokens"])
def _qnorm_rope_insert_kernel(
    q_ptr,
    kv_ptr,
    cache_ptr,
    slots_ptr,
    positions_ptr,
    cos_sin_ptr,
    eps,
    num_heads,
    num_slot_tokens,
    num_slots,
    max_position,
    q_token_stride,
    q_head_stride,
    kv_stride,
    block_stride,
    cos_sin_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM_Q: tl.constexpr = True,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    NOPE_DIM: tl.constexpr = NOPE_DIM,
):
    """The KV row of a token in its program 0, BLOCK_H heads of its query in others."""
    WORDS: tl.constexpr = HEAD_DIM // 2
    NOPE_WORDS: tl.constexpr = NOPE_DIM // 2
    HALF_ROPE: tl.constexpr = (HEAD_DIM - NOPE_DIM) // 2
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    if tile == 0:
        slot = tl.full((), -1, tl.int64)
        if token < num_slot_tokens:
            slot = tl.load(slots_ptr + token).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            word_offs = row_words()  # [8, 32]
            row_ptr = (kv_ptr + token * kv_stride).to(tl.pointer_type(tl.int32))
            k_even, k_odd = unpack_bf16(tl.load(row_ptr + word_offs))  # [8, 32] each
            k_rope_mask = word_offs >= NOPE_WORDS  # [8, 32]
            # [8, 32] each
            k_cos, k_sin = load_rotation(
                cos_sin_ptr,
                cos_sin_stride,
                position,
                max_position,
                word_offs - NOPE_WORDS,
                k_rope_mask,
                HALF_ROPE,
            )
            k_even, k_odd = rotate(k_even, k_odd, k_cos, k_sin, k_rope_mask)
            insert_row(k_even, k_odd, cache_ptr, slot, block_stride, BLOCK_SIZE)
    else:
        head_offs = (tile - 1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        pair_offs = tl.arange(0, WORDS)  # [WORDS]
        token_ptr = (q_ptr + token * q_token_stride).to(tl.pointer_type(tl.int32))
        # [BLOCK_H, 1]
        head_word_offs = head_offs.to(tl.int64)[:, None] * (q_head_stride // 2)
        # [BLOCK_H, WORDS]
        q_mask = (head_offs[:, None] < num_heads) & (pair_offs[None, :] < WORDS)
        # [BLOCK_H, WORDS]
        words = tl.load(
            token_ptr + head_word_offs + pair_offs[None, :], mask=q_mask, other=0
        )
        even, odd = unpack_bf16(words)  # [BLOCK_H, WORDS] each
        if NORM_Q:
            # [BLOCK_H]
            mean = tl.sum(even * even + odd * odd, axis=1) * (1.0 / HEAD_DIM)
            rms_scale = tl.rsqrt(mean + eps)[:, None]  # [BLOCK_H, 1]
            even, odd = even * rms_scale, odd * rms_scale
        # [WORDS] each
        cos, sin = load_rotation(
            cos_sin_ptr,
            cos_sin_stride,
            position,
            max_position,
            pair_offs - NOPE_WORDS,
            pair_offs >= NOPE_WORDS,
            HALF_ROPE,
        )
        even, odd = rotate(
            even,
            odd,
            cos[None, :],
            sin[None, :],
            pair_offs[None, :] >= NOPE_WORDS,
        )
        tl.store(
            token_ptr + head_word_offs + pair_offs[None, :],
            pack_bf16(even, odd),
            mask=q_mask,
        )


def xpu_qnorm_rope_kv_fp8_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
    norm_q: bool = True,
) -> None:
    """Normalize and rotate `q` in place; rotate `kv` and write it into its pages.

    Each head of q becomes `q * rsqrt(mean(q^2) + eps)`, without a weight, in fp32. The
    last 64 values of q and kv are rotated by interleaved RoPE in fp32. q is rounded to
    bf16 once. `kv` itself stays as it is. Of a KV row, a block of 64 of the first 448
    values is stored as e4m3 codes of `x / 2^e`, rounded to nearest even, with
    `e = ceil(log2(max(amax, 1e-4) / 448))`; the last 64 stay bf16. One launch.

    Args:
        q (torch.Tensor):
            Queries of shape `[T, H, 512]`, bf16, written in place; may be strided.
        kv (torch.Tensor):
            KV rows of shape `[T, 512]`, bf16; may be strided.
        swa_kv_cache (torch.Tensor):
            Pages of shape `[num_blocks, page bytes]` or
            `[num_blocks, block_size, 584]`, uint8. The block stride may be padded.
        slot_mapping (torch.Tensor):
            Slots of the first S rows, of shape `[S]`, int64 or int32. A slot below 0 or
            beyond the cache writes nothing.
        positions (torch.Tensor):
            Position of each token, of shape `[T]`, int64 or int32. A position outside
            the table leaves the token unrotated.
        cos_sin_cache (torch.Tensor):
            Table of shape `[max_position, 64]`, fp32 or bf16: 32 cosines, then 32
            sines.
        eps (float):
            Added to the mean square.
        block_size (int):
            Tokens per page.
        norm_q (bool):
            False to rotate q without its norm.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_once(
        _check,
        q,
        kv,
        swa_kv_cache,
        slot_mapping,
        positions,
        cos_sin_cache,
        eps,
        block_size,
    )
    tokens, heads, _ = q.shape
    num_slots = swa_kv_cache.shape[0] * block_size
    if tokens:
        block_h = 4 if heads * tokens <= 1024 else 8
        _qnorm_rope_insert_kernel[(tokens, 1 + cdiv(heads, block_h))](
            q,
            kv,
            swa_kv_cache,
            slot_mapping,
            positions,
            cos_sin_cache,
            eps,
            heads,
            slot_mapping.shape[0],
            num_slots,
            cos_sin_cache.shape[0],
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            swa_kv_cache.stride(0),
            cos_sin_cache.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK_H=block_h,
            NORM_Q=norm_q,
            **launch_options(q.device, num_warps=4),
        )


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
) -> None:
    """Raise unless the arguments of `xpu_qnorm_rope_kv_fp8_insert` fit together."""
    check_shape("q", q, None, None, HEAD_DIM)
    check_pair_rows("q", q)
    tokens = q.shape[0]
    check_shape("kv", kv, tokens, HEAD_DIM)
    check_pair_rows("kv", kv)
    check_page_cache("swa_kv_cache", swa_kv_cache, block_size)
    check_rotary(positions, cos_sin_cache, tokens, ROPE_DIM)
    check_same_device(
        q=q,
        kv=kv,
        swa_kv_cache=swa_kv_cache,
        slot_mapping=slot_mapping,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
    )
    if eps < 0:
        fail("eps", eps, "a number of at least 0")
    check_slots(slot_mapping, tokens)
