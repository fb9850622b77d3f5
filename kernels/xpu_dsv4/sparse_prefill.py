# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA prefill over gathered bf16 keys."""

from typing import NamedTuple

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_range,
    check_same_device,
    check_shape,
    fail,
    index_rows,
)
from ._launch import launch_options
from ._softmax import LOG2E, check_sink, finish, softmax_step
from ._triton import tl, triton

VALUE_DIM = 512


class PrefillConfig(NamedTuple):
    """block_h heads and block_n keys a tile.

    `hold_tile` keeps queries and one tile of keys on chip for both products; without
    it the scores are summed over chunks of 64 dims and the values read again.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    grf: int
    hold_tile: bool


@triton.jit
def _prefill_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    lens_ptr,
    sink_ptr,
    out_ptr,
    max_logits_ptr,
    lse_ptr,
    num_heads,
    num_rows,
    width,
    q_token_stride,
    q_head_stride,
    kv_stride,
    indices_stride,
    out_token_stride,
    out_head_stride,
    qk_scale,
    EXTRA: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOLD_TILE: tl.constexpr,
):
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    heads = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = heads < num_heads
    keys = tl.arange(0, BLOCK_N)
    value_dims = tl.arange(0, 512)
    dims = tl.arange(0, 64)

    q_rows = q_ptr + token * q_token_stride + heads.to(tl.int64) * q_head_stride
    q_rows = q_rows[:, None]
    q_mask = head_mask[:, None]
    if HOLD_TILE:
        q = tl.load(q_rows + value_dims[None, :], mask=q_mask, other=0.0)
        if EXTRA:
            q_extra = tl.load(q_rows + 512 + dims[None, :], mask=q_mask, other=0.0)

    length = width
    if HAS_LENS:
        length = tl.load(lens_ptr + token).to(tl.int32)
        length = tl.minimum(tl.maximum(length, 0), width)

    row_max = tl.full([BLOCK_H], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, 512], tl.float32)
    index_row = indices_ptr + token * indices_stride
    next_row = tl.load(index_row + keys, mask=keys < length, other=-1)
    for start in range(0, length, BLOCK_N):
        row = next_row
        ahead = start + BLOCK_N + keys
        next_row = tl.load(index_row + ahead, mask=ahead < length, other=-1)
        valid = (row >= 0) & (row < num_rows)
        kv_rows = (kv_ptr + row.to(tl.int64) * kv_stride)[:, None]
        kv_mask = valid[:, None]
        if HOLD_TILE:
            kv = tl.load(kv_rows + value_dims[None, :], mask=kv_mask, other=0.0)
            score = tl.dot(q, tl.trans(kv))
            if EXTRA:
                extra = tl.load(kv_rows + 512 + dims[None, :], mask=kv_mask, other=0.0)
                score = tl.dot(q_extra, tl.trans(extra), score)
            # A region of its own hides from the compiler that one product feeds the
            # other: it would have every warp group repeat all rows of the scores.
            # The branch is always taken; its alternative must use the scores too.
            p = score.to(tl.bfloat16)
            rescale = tl.zeros([BLOCK_H], tl.float32)
            if start < length:
                p, rescale, row_max, row_sum = softmax_step(
                    score, valid, qk_scale, row_max, row_sum
                )
            acc = tl.dot(p, kv, acc * rescale[:, None])
        else:
            score = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            for chunk in range(0, 512 + EXTRA, 64):
                columns = (chunk + dims)[None, :]
                q = tl.load(q_rows + columns, mask=q_mask, other=0.0)
                k = tl.load(kv_rows + columns, mask=kv_mask, other=0.0)
                score = tl.dot(q, tl.trans(k), score)
            p, rescale, row_max, row_sum = softmax_step(
                score, valid, qk_scale, row_max, row_sum
            )
            acc *= rescale[:, None]
            if tl.max(valid.to(tl.int32), 0) > 0:
                v = tl.load(kv_rows + value_dims[None, :], mask=kv_mask, other=0.0)
                acc = tl.dot(p, v, acc)

    factor = finish(row_max, row_sum, sink_ptr, heads, head_mask, HAS_SINK)
    out_rows = out_ptr + token * out_token_stride
    out_rows += heads.to(tl.int64)[:, None] * out_head_stride
    tl.store(
        out_rows + value_dims[None, :],
        (acc * factor[:, None]).to(tl.bfloat16),
        mask=q_mask,
    )
    state = token * num_heads + heads
    ln2 = 0.6931471805599453
    has_keys = row_sum > 0.0
    log_sum = tl.log2(tl.where(has_keys, row_sum, 1.0))
    max_logits = tl.where(has_keys, row_max * ln2, float("-inf"))
    lse = tl.where(has_keys, (row_max + log_sum) * ln2, float("inf"))
    tl.store(max_logits_ptr + state, max_logits, mask=head_mask)
    tl.store(lse_ptr + state, lse, mask=head_mask)


def prefill_config(device_type: str, num_heads: int) -> PrefillConfig:
    """The configuration for one launch; see `_decode_config.decode_config`."""
    if device_type != "cuda":
        block_h = 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64
        block_n = 32 if block_h == 32 else 16
        return PrefillConfig(block_h, block_n, 16, 1, 256, False)
    if num_heads > 16:
        return PrefillConfig(64, 64, 8, 2, 128, True)
    return PrefillConfig(16, 64, 4, 2, 128, True)


def triton_bf16_mla_sparse_interface(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    block_dpe: int = 64,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each query over the keys that its row of `indices` names.

    With s = sm_scale * q.k over all dims and v = k[:512]:
    out = sum(exp(s) * v) / (sum(exp(s)) + exp(sink)) and lse = ln(sum(exp(s))), without
    the sink. A query without valid keys gives out 0, max_logits -inf and lse +inf, as
    FlashMLA defines.

    Args:
        q: queries of shape `[num_tokens, num_heads, 512 or 576]`, bf16.
        kv: keys of shape `[num_rows, 1, as q]`, bf16.
        indices: rows of `kv`, `[num_tokens, (1,) topk]`, int32 or int64; entries
            outside `[0, num_rows)` are skipped.
        sm_scale: factor of q.k.
        d_v: 512.
        block_dpe: dims of the rotary part, 0 to 64; only upstream's kernel splits it
            off, so the result does not depend on it.
        attn_sink: `[>= num_heads]`, fp32 or bf16, natural-log units, or None.
        topk_length: `[num_tokens]`: only so many first entries of a row count; the
            rest is not visited. None takes the width.
        out: bf16 `[num_tokens, num_heads, 512]` to write in place; None allocates.

    Returns:
        out, and max_logits and lse of shape `[num_tokens, num_heads]`, fp32.

    Raises:
        ValueError: an argument has a wrong dtype, shape, stride, device or size.

    """
    check_dtype("q", q, torch.bfloat16)
    if q.dim() != 3 or q.shape[2] not in (VALUE_DIM, VALUE_DIM + 64):
        fail("q.shape", list(q.shape), "[num_tokens, num_heads, 512 or 576]")
    num_tokens, num_heads, dim = q.shape
    if num_heads < 1:
        fail("q.shape[1]", num_heads, "at least one head")
    check_inner_contiguous("q", q)
    check_dtype("kv", kv, torch.bfloat16)
    check_shape("kv", kv, None, 1, dim)
    check_inner_contiguous("kv", kv)
    if d_v != VALUE_DIM:
        fail("d_v", d_v, str(VALUE_DIM))
    if not 0 <= block_dpe <= 64:
        fail("block_dpe", block_dpe, "0 to 64")
    rows = index_rows("indices", indices, num_tokens)
    check_sink(attn_sink, num_heads)
    if topk_length is not None:
        check_dtype("topk_length", topk_length, torch.int32, torch.int64)
        check_shape("topk_length", topk_length, num_tokens)
        check_inner_contiguous("topk_length", topk_length)
        check_range("topk_length", topk_length, 0, rows.shape[1] + 1)
    if out is None:
        out = torch.empty(
            (num_tokens, num_heads, VALUE_DIM), dtype=q.dtype, device=q.device
        )
    check_dtype("out", out, torch.bfloat16)
    check_shape("out", out, num_tokens, num_heads, VALUE_DIM)
    check_inner_contiguous("out", out)
    check_same_device(
        q=q,
        kv=kv,
        indices=indices,
        attn_sink=attn_sink,
        topk_length=topk_length,
        out=out,
    )
    shape = (num_tokens, num_heads)
    max_logits = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return out, max_logits, lse

    config = prefill_config(q.device.type, num_heads)
    head_blocks = triton.cdiv(num_heads, config.block_h)
    _prefill_kernel[(num_tokens * head_blocks,)](
        q,
        kv,
        rows,
        topk_length,
        attn_sink,
        out,
        max_logits,
        lse,
        num_heads,
        kv.shape[0],
        rows.shape[1],
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        rows.stride(0),
        out.stride(0),
        out.stride(1),
        sm_scale * LOG2E,
        EXTRA=dim - VALUE_DIM,
        HAS_LENS=topk_length is not None,
        HAS_SINK=attn_sink is not None,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        HOLD_TILE=config.hold_tile,
        **launch_options(q.device, config.num_warps, config.num_stages, config.grf),
    )
    return out, max_logits, lse
