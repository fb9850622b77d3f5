# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Query norm and RoPE, and the KV row's RoPE, quantization and page insert, in one.

A program owns either some heads of one token's query or that token's KV row; the row
goes from registers to its page and is never materialized.
"""

import torch

from ._checks import check_range, check_same_device, check_shape, fail
from ._launch import launch_options
from ._pages import HEAD_DIM, ROPE_DIM, check_page_cache
from ._pairs import (
    check_pair_rows,
    check_rotary,
    load_rotation,
    pack_bf16,
    rotate,
    unpack_bf16,
)
from ._triton import tl, triton
from .kv_quant import check_slots, insert_row


@triton.jit
def _qnorm_rope_insert_kernel(
    q_ptr,
    kv_ptr,
    cache_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    eps,
    num_heads,
    num_slot_tokens,
    num_slots,
    max_position,
    q_stride_token,
    q_stride_head,
    kv_stride,
    block_stride,
    cos_sin_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position = tl.load(position_ptr + token).to(tl.int64)
    if tile == 0:
        slot = tl.full((), -1, tl.int64)
        if token < num_slot_tokens:
            slot = tl.load(slot_ptr + token).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            words = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
            row = (kv_ptr + token * kv_stride).to(tl.pointer_type(tl.int32))
            even, odd = unpack_bf16(tl.load(row + words))  # [8, 32]
            is_rope = words >= 224
            cos, sin = load_rotation(
                cos_sin_ptr,
                cos_sin_stride,
                position,
                max_position,
                words - 224,
                is_rope,
                32,
            )
            even, odd = rotate(even, odd, cos, sin, is_rope)
            insert_row(even, odd, cache_ptr, slot, block_stride, BLOCK_SIZE)
    else:
        head = (tile - 1) * HEADS + tl.arange(0, HEADS)  # [HEADS]
        word = tl.arange(0, 256)
        base = (q_ptr + token * q_stride_token).to(tl.pointer_type(tl.int32))
        rows = head.to(tl.int64)[:, None] * (q_stride_head // 2)
        mask = (head[:, None] < num_heads) & (word[None, :] < 256)
        packed = tl.load(base + rows + word[None, :], mask=mask, other=0)
        even, odd = unpack_bf16(packed)  # [HEADS, 256]
        mean = tl.sum(even * even + odd * odd, axis=1) * (1.0 / 512.0)
        scale = tl.rsqrt(mean + eps)[:, None]
        cos, sin = load_rotation(
            cos_sin_ptr,
            cos_sin_stride,
            position,
            max_position,
            word - 224,
            word >= 224,
            32,
        )
        even, odd = rotate(
            even * scale,
            odd * scale,
            cos[None, :],
            sin[None, :],
            word[None, :] >= 224,
        )
        tl.store(base + rows + word[None, :], pack_bf16(even, odd), mask=mask)


def xpu_qnorm_rope_kv_fp8_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
) -> None:
    """Normalize and rotate `q` in place; rotate, quantize and page `kv`. One launch.

    Per head `q * rsqrt(mean(q^2) + eps)`, no weight, in fp32; interleaved RoPE on the
    last 64 values of q and kv in fp32; one rounding to bf16. The KV row is stored as
    `quantize_and_insert_k_cache` stores it; `kv` itself stays as it is.

    Args:
        q: queries of shape `[T, H, 512]`, bf16, written in place; may be strided.
        kv: KV rows of shape `[T, 512]`, bf16; may be strided.
        swa_kv_cache: pages of shape `[num_blocks, page bytes]` or
            `[num_blocks, block_size, 584]`, uint8. The block stride may be padded.
        slot_mapping: slots of shape `[S]`, S <= T, int64 or int32. A slot below 0 or
            beyond the cache writes nothing.
        positions: token positions of shape `[T]`, int64 or int32. A position outside
            the table leaves the token unrotated.
        cos_sin_cache: table of shape `[max_position, 64]`, fp32 or bf16: 32 cosines,
            then 32 sines.
        eps: added to the mean square.
        block_size: tokens a page.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_shape("q", q, None, None, HEAD_DIM)
    check_pair_rows("q", q)
    tokens, heads, _ = q.shape
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
    num_slots = swa_kv_cache.shape[0] * block_size
    check_slots(slot_mapping, tokens, num_slots)
    check_range("positions", positions, 0, cos_sin_cache.shape[0])

    if tokens:
        tile = 4 if heads * tokens <= 1024 else 8
        _qnorm_rope_insert_kernel[(tokens, 1 + triton.cdiv(heads, tile))](
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
            HEADS=tile,
            **launch_options(q.device, num_warps=4),
        )
