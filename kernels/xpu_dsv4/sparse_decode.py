# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode over FP8 pages: one fused kernel and a merge of its key splits."""

from typing import NamedTuple

import torch

from . import _checks
from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_range,
    check_same_device,
    check_shape,
    fail,
)
from ._fp8 import (
    HEAD_DIM,
    NOPE_DIM,
    ROPE_DIM,
    check_pages,
    dequantize,
    load_exponents,
    load_nope_codes,
    load_rope,
    token_pointers,
)
from ._launch import launch_options
from ._merge import PARTIAL_WIDTH, finish, merge_splits
from ._triton import tl, triton

LOG2E = 1.4426950408889634


class DecodeConfig(NamedTuple):
    """How one decode is cut into programs.

    block_h heads and block_n keys a tile; `splits` programs share a token's keys;
    `halves` programs of 256 value dims each share a head block; guard_pv puts the
    second product in a region of its own.
    """

    block_h: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    grf: int
    halves: int
    guard_pv: bool


@triton.jit
def _load_slots(
    topk_row_ptr,
    swa_row_ptr,
    position,
    topk_len,
    last,
    kv_slots,
    swa_slots,
    HAS_TOPK: tl.constexpr,
):
    """int32 slots of the keys at `position`: the top-k's first, then the window's.

    -1 stands for a position past `last` and for an index outside its cache.
    """
    in_swa = (position >= topk_len) & (position < last)
    slot = tl.load(swa_row_ptr + (position - topk_len), mask=in_swa, other=-1)
    slot = tl.where((slot >= 0) & (slot < swa_slots), slot, -1).to(tl.int32)
    if HAS_TOPK:
        in_topk = (position < topk_len) & (position < last)
        topk = tl.load(topk_row_ptr + position, mask=in_topk, other=-1)
        topk = tl.where((topk >= 0) & (topk < kv_slots), topk, -1).to(tl.int32)
        slot = tl.where(in_topk, topk, slot)
    return slot


@triton.jit
def _add_values(o, p, v, rescale, some, GUARD_PV: tl.constexpr):
    """o * rescale + p @ v; GUARD_PV puts the product in a region of its own."""
    o *= rescale[:, None]
    if GUARD_PV:
        if some:
            o = tl.dot(p, v, o)
    else:
        o = tl.dot(p, v, o)
    return o


@triton.jit
def _decode_kernel(
    q_ptr,
    kv_ptr,
    swa_ptr,
    topk_indices_ptr,
    topk_lens_ptr,
    swa_indices_ptr,
    swa_lens_ptr,
    sink_ptr,
    out_ptr,
    partial_ptr,
    num_heads,
    topk_width,
    swa_width,
    kv_slots,
    swa_slots,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_block_stride,
    swa_block_stride,
    topk_stride,
    swa_stride,
    qk_scale,
    KV_BLOCK_SIZE: tl.constexpr,
    SWA_BLOCK_SIZE: tl.constexpr,
    HAS_TOPK: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
    GUARD_PV: tl.constexpr,
):
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    program = tl.program_id(0) // HALVES
    half = tl.program_id(0) % HALVES
    head_block = program % head_blocks
    split = (program // head_blocks) % SPLITS
    token = (program // head_blocks // SPLITS).to(tl.int64)

    heads = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = heads < num_heads
    dims = tl.arange(0, 64)
    keys = tl.arange(0, BLOCK_N)

    q_rows = q_ptr + token * q_token_stride + heads.to(tl.int64) * q_head_stride
    q_tile = q_rows[:, None] + dims[None, :]
    q_mask = head_mask[:, None]
    q0 = tl.load(q_tile, mask=q_mask, other=0.0)
    q1 = tl.load(q_tile + 64, mask=q_mask, other=0.0)
    q2 = tl.load(q_tile + 128, mask=q_mask, other=0.0)
    q3 = tl.load(q_tile + 192, mask=q_mask, other=0.0)
    q4 = tl.load(q_tile + 256, mask=q_mask, other=0.0)
    q5 = tl.load(q_tile + 320, mask=q_mask, other=0.0)
    q6 = tl.load(q_tile + 384, mask=q_mask, other=0.0)
    q7 = tl.load(q_tile + 448, mask=q_mask, other=0.0)

    topk_len = 0
    if HAS_TOPK:
        topk_len = tl.load(topk_lens_ptr + token).to(tl.int32)
        topk_len = tl.minimum(tl.maximum(topk_len, 0), topk_width)
    swa_len = tl.load(swa_lens_ptr + token).to(tl.int32)
    swa_len = tl.minimum(tl.maximum(swa_len, 0), swa_width)
    num_keys = topk_len + swa_len
    per_split = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), SPLITS) * BLOCK_N
    first = split * per_split
    last = tl.minimum(first + per_split, num_keys)

    topk_row_ptr = topk_indices_ptr + token * topk_stride
    swa_row_ptr = swa_indices_ptr + token * swa_stride

    row_max = tl.full([BLOCK_H], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    o0 = tl.zeros([BLOCK_H, 64], tl.float32)
    o1 = tl.zeros([BLOCK_H, 64], tl.float32)
    o2 = tl.zeros([BLOCK_H, 64], tl.float32)
    o3 = tl.zeros([BLOCK_H, 64], tl.float32)
    if HALVES == 1:
        o4 = tl.zeros([BLOCK_H, 64], tl.float32)
        o5 = tl.zeros([BLOCK_H, 64], tl.float32)
        o6 = tl.zeros([BLOCK_H, 64], tl.float32)
        o7 = tl.zeros([BLOCK_H, 64], tl.float32)

    slot = _load_slots(
        topk_row_ptr,
        swa_row_ptr,
        first + keys,
        topk_len,
        last,
        kv_slots,
        swa_slots,
        HAS_TOPK,
    )
    for start in range(first, last, BLOCK_N):
        position = start + keys
        next_slot = _load_slots(
            topk_row_ptr,
            swa_row_ptr,
            position + BLOCK_N,
            topk_len,
            last,
            kv_slots,
            swa_slots,
            HAS_TOPK,
        )
        valid = slot >= 0
        data, exponents_ptr = token_pointers(
            swa_ptr, slot, swa_block_stride, SWA_BLOCK_SIZE
        )
        if HAS_TOPK:
            in_topk = position < topk_len
            topk_data, topk_exponents_ptr = token_pointers(
                kv_ptr, slot, kv_block_stride, KV_BLOCK_SIZE
            )
            data = tl.where(in_topk, topk_data, data)
            exponents_ptr = tl.where(in_topk, topk_exponents_ptr, exponents_ptr)

        c0 = load_nope_codes(data, dims, valid, 0)
        c1 = load_nope_codes(data, dims, valid, 1)
        c2 = load_nope_codes(data, dims, valid, 2)
        c3 = load_nope_codes(data, dims, valid, 3)
        c4 = load_nope_codes(data, dims, valid, 4)
        c5 = load_nope_codes(data, dims, valid, 5)
        c6 = load_nope_codes(data, dims, valid, 6)
        k7 = load_rope(data, dims, valid)
        exponents = load_exponents(exponents_ptr, valid)[:, None]
        k0 = dequantize(c0, exponents, 0)
        k1 = dequantize(c1, exponents, 1)
        k2 = dequantize(c2, exponents, 2)
        k3 = dequantize(c3, exponents, 3)
        k4 = dequantize(c4, exponents, 4)
        k5 = dequantize(c5, exponents, 5)
        k6 = dequantize(c6, exponents, 6)

        score = tl.dot(q0, tl.trans(k0))
        score = tl.dot(q1, tl.trans(k1), score)
        score = tl.dot(q2, tl.trans(k2), score)
        score = tl.dot(q3, tl.trans(k3), score)
        score = tl.dot(q4, tl.trans(k4), score)
        score = tl.dot(q5, tl.trans(k5), score)
        score = tl.dot(q6, tl.trans(k6), score)
        score = tl.dot(q7, tl.trans(k7), score)

        score = tl.where(valid[None, :], score * qk_scale, -1.0e30)
        new_max = tl.maximum(row_max, tl.max(score, 1))
        rescale = tl.exp2(row_max - new_max)
        weight = tl.where(valid[None, :], tl.exp2(score - new_max[:, None]), 0.0)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        row_max = new_max
        p = weight.to(tl.bfloat16)
        some = tl.max(valid.to(tl.int32), 0) > 0
        if HALVES == 1:
            o0 = _add_values(o0, p, k0, rescale, some, GUARD_PV)
            o1 = _add_values(o1, p, k1, rescale, some, GUARD_PV)
            o2 = _add_values(o2, p, k2, rescale, some, GUARD_PV)
            o3 = _add_values(o3, p, k3, rescale, some, GUARD_PV)
            o4 = _add_values(o4, p, k4, rescale, some, GUARD_PV)
            o5 = _add_values(o5, p, k5, rescale, some, GUARD_PV)
            o6 = _add_values(o6, p, k6, rescale, some, GUARD_PV)
            o7 = _add_values(o7, p, k7, rescale, some, GUARD_PV)
        else:
            if half == 0:
                o0 = _add_values(o0, p, k0, rescale, some, GUARD_PV)
                o1 = _add_values(o1, p, k1, rescale, some, GUARD_PV)
                o2 = _add_values(o2, p, k2, rescale, some, GUARD_PV)
                o3 = _add_values(o3, p, k3, rescale, some, GUARD_PV)
            else:
                o0 = _add_values(o0, p, k4, rescale, some, GUARD_PV)
                o1 = _add_values(o1, p, k5, rescale, some, GUARD_PV)
                o2 = _add_values(o2, p, k6, rescale, some, GUARD_PV)
                o3 = _add_values(o3, p, k7, rescale, some, GUARD_PV)

        slot = next_slot

    if SPLITS == 1:
        factor = finish(row_max, row_sum, sink_ptr, heads, head_mask, HAS_SINK)[:, None]
        target = out_ptr + token * out_token_stride + half * 256
        target += heads.to(tl.int64)[:, None] * out_head_stride + dims[None, :]
        tl.store(target, (o0 * factor).to(tl.bfloat16), mask=q_mask)
        tl.store(target + 64, (o1 * factor).to(tl.bfloat16), mask=q_mask)
        tl.store(target + 128, (o2 * factor).to(tl.bfloat16), mask=q_mask)
        tl.store(target + 192, (o3 * factor).to(tl.bfloat16), mask=q_mask)
        if HALVES == 1:
            tl.store(target + 256, (o4 * factor).to(tl.bfloat16), mask=q_mask)
            tl.store(target + 320, (o5 * factor).to(tl.bfloat16), mask=q_mask)
            tl.store(target + 384, (o6 * factor).to(tl.bfloat16), mask=q_mask)
            tl.store(target + 448, (o7 * factor).to(tl.bfloat16), mask=q_mask)
    else:
        row = (token * num_heads + heads) * SPLITS + split
        programs = head_blocks * SPLITS * HALVES
        num_tokens = (tl.num_programs(0) // programs).to(tl.int64)
        state = partial_ptr + num_tokens * num_heads * SPLITS * 512 + row * 2
        tl.store(state, row_max, mask=head_mask)
        tl.store(state + 1, row_sum, mask=head_mask)
        target = partial_ptr + row[:, None] * 512 + half * 256 + dims[None, :]
        part_mask = q_mask & (first < last)
        tl.store(target, o0, mask=part_mask)
        tl.store(target + 64, o1, mask=part_mask)
        tl.store(target + 128, o2, mask=part_mask)
        tl.store(target + 192, o3, mask=part_mask)
        if HALVES == 1:
            tl.store(target + 256, o4, mask=part_mask)
            tl.store(target + 320, o5, mask=part_mask)
            tl.store(target + 384, o6, mask=part_mask)
            tl.store(target + 448, o7, mask=part_mask)


def decode_config(
    device_type: str, num_tokens: int, num_heads: int, max_keys: int
) -> DecodeConfig:
    """The configuration for one launch, from sizes that the host knows.

    Args:
        device_type: `torch.device.type`; `cuda` is tuned on an H200, every other
            device takes the shapes that compile for Intel GPUs without a spill.
        num_tokens: rows of `q`.
        num_heads: heads of `q`.
        max_keys: `topk_indices` plus `swa_indices` columns.
    """
    if device_type == "cuda":
        return _cuda_config(num_tokens, num_heads, max_keys)
    block_n = 16
    if num_heads <= 8:
        block_h, num_warps = 8, 4
    elif num_heads <= 16:
        block_h, num_warps = 16, 8
    elif num_heads <= 32:
        block_h, num_warps = 32, 8
    else:
        block_h, num_warps = 64, 16
    splits = _splits(num_tokens, num_heads, max_keys, block_h, block_n, 256, 32)
    return DecodeConfig(block_h, block_n, splits, num_warps, 1, 256, 1, True)


def _cuda_config(num_tokens: int, num_heads: int, max_keys: int) -> DecodeConfig:
    if num_heads > 64 and num_tokens >= 8:
        splits = _splits(2 * num_tokens, num_heads, max_keys, 128, 64, 132, 16)
        return DecodeConfig(128, 64, splits, 8, 1, 128, 2, False)
    if num_heads > 16:
        splits = _splits(2 * num_tokens, num_heads, max_keys, 64, 32, 256, 32)
        return DecodeConfig(64, 32, splits, 4, 1, 128, 2, False)
    splits = _splits(num_tokens, num_heads, max_keys, 16, 32, 256, 16)
    return DecodeConfig(16, 32, splits, 4, 3, 128, 1, False)


def _splits(
    rows: int,
    num_heads: int,
    max_keys: int,
    block_h: int,
    block_n: int,
    programs: int,
    most: int,
) -> int:
    """Power-of-two splits that fill `programs` from `rows` unsplit ones a head block.

    At most `most`, and at most one a key tile.
    """
    busy = max(rows * triton.cdiv(num_heads, block_h), 1)
    wanted = min(programs // busy, triton.cdiv(max_keys, block_n), most)
    return 1 << max(wanted.bit_length() - 1, 0) if wanted > 0 else 1


def sparse_decode_workspace_size(
    max_num_tokens: int, num_heads: int, max_keys: int, device_type: str = "xpu"
) -> int:
    """fp32 elements of `workspace` that serve every batch up to `max_num_tokens`."""
    return max(
        (
            tokens * num_heads * splits * PARTIAL_WIDTH
            for tokens in range(1, max_num_tokens + 1)
            if (
                splits := decode_config(device_type, tokens, num_heads, max_keys).splits
            )
            > 1
        ),
        default=0,
    )


def _index_rows(name: str, indices: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`[num_tokens, width]` view of a 2-dim or `[num_tokens, 1, width]` tensor."""
    check_dtype(name, indices, torch.int32, torch.int64)
    rows = indices.squeeze(1) if indices.dim() == 3 else indices
    if rows.dim() != 2 or rows.shape[0] != num_tokens:
        fail(
            f"{name}.shape",
            list(indices.shape),
            f"[{num_tokens}, width] or [{num_tokens}, 1, width]",
        )
    check_inner_contiguous(name, rows)
    return rows


def _check_slots(
    name: str, rows: torch.Tensor, lens: torch.Tensor, cache: torch.Tensor
) -> None:
    """Under the debug switch: raise for a slot beyond the cache among the keys."""
    if not _checks.DEBUG:
        return
    column = torch.arange(rows.shape[1], device=rows.device)
    counted = torch.where(column < lens.reshape(-1, 1), rows, -1)
    check_range(name, counted, -1, _num_slots(cache))


def _check_lengths(name: str, lens: torch.Tensor, num_tokens: int, width: int) -> None:
    check_dtype(name, lens, torch.int32, torch.int64)
    if lens.numel() != num_tokens or (lens.dim() and lens.shape[0] != num_tokens):
        fail(f"{name}.shape", list(lens.shape), f"[{num_tokens}]")
    if num_tokens > 1 and lens.stride(0) != 1:
        fail(f"{name}.stride()", tuple(lens.stride()), "(1,)")
    check_range(name, lens, 0, width + 1)


def xpu_sparse_decode_fp8(
    q: torch.Tensor,
    kv_cache: torch.Tensor | None,
    swa_kv_cache: torch.Tensor,
    swa_only: bool,
    topk_indices: torch.Tensor | None,
    topk_lens: torch.Tensor | None,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    head_dim: int,
    nope_head_dim: int,
    rope_head_dim: int,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Attention of each token over its selected keys, read straight from FP8 pages.

    A token's keys are the first `topk_lens` entries of `topk_indices`, in `kv_cache`,
    and the first `swa_lens` entries of `swa_indices`, in `swa_kv_cache`; entries
    outside `[0, slots)` are skipped and nothing is read for them. With s = scale * q.k
    and K = V, out = sum(exp(s) * v) / (sum(exp(s)) + exp(sink)); a token without keys
    gives 0. Never synchronizes with the host; at most two launches.

    Args:
        q: queries of shape `[num_tokens, num_heads, 512]`, bf16, 1 to 128 heads.
        kv_cache: compressed keys, `[num_blocks, block_size, 584]` uint8 FP8 pages
            with any block stride that is a multiple of 8 bytes; None if `swa_only`.
        swa_kv_cache: keys of the sliding window, as `kv_cache`.
        swa_only: ignore `kv_cache`, `topk_indices` and `topk_lens`.
        topk_indices: global slots of shape `[num_tokens, (1,) topk]`, int32 or int64.
        topk_lens: `[num_tokens]`, int32 or int64; values are clamped to the width.
        swa_indices: global slots of shape `[num_tokens, (1,) window]`.
        swa_lens: `[num_tokens]`.
        attn_sink: `[>= num_heads]`, fp32 or bf16, natural-log units; -inf or None for
            no sink.
        softmax_scale: factor of q.k, usually 512 ** -0.5.
        head_dim: 512.
        nope_head_dim: 448.
        rope_head_dim: 64.
        out: `[num_tokens, num_heads, 512]`, bf16, written in place.
        workspace: contiguous fp32 buffer of `sparse_decode_workspace_size` elements
            for the partials of the key splits; None allocates.

    Raises:
        ValueError: an argument has a wrong dtype, shape, stride, device or size.
    """
    _check_head_dims(head_dim, nope_head_dim, rope_head_dim)
    num_tokens, num_heads = _check_queries(q, out)
    check_pages("swa_kv_cache", swa_kv_cache)
    swa_rows = _index_rows("swa_indices", swa_indices, num_tokens)
    _check_lengths("swa_lens", swa_lens, num_tokens, swa_rows.shape[1])
    use_topk = not swa_only and topk_indices is not None and kv_cache is not None
    if use_topk:
        check_pages("kv_cache", kv_cache)
        topk_rows = _index_rows("topk_indices", topk_indices, num_tokens)
        if topk_lens is None:
            fail("topk_lens", None, "a tensor beside topk_indices")
        _check_lengths("topk_lens", topk_lens, num_tokens, topk_rows.shape[1])
    else:
        kv_cache, topk_rows, topk_lens = swa_kv_cache, swa_rows, swa_lens
    if attn_sink is not None:
        check_dtype("attn_sink", attn_sink, torch.float32, torch.bfloat16)
        if attn_sink.dim() != 1 or attn_sink.shape[0] < num_heads:
            fail("attn_sink.shape", list(attn_sink.shape), f"[at least {num_heads}]")
        check_inner_contiguous("attn_sink", attn_sink)
    check_same_device(
        q=q,
        kv_cache=kv_cache,
        swa_kv_cache=swa_kv_cache,
        topk_indices=topk_rows,
        topk_lens=topk_lens,
        swa_indices=swa_rows,
        swa_lens=swa_lens,
        attn_sink=attn_sink,
        out=out,
        workspace=workspace,
    )
    if num_tokens == 0:
        return
    _check_slots("swa_indices", swa_rows, swa_lens, swa_kv_cache)
    if use_topk:
        _check_slots("topk_indices", topk_rows, topk_lens, kv_cache)

    topk_width = topk_rows.shape[1] if use_topk else 0
    config = decode_config(
        q.device.type, num_tokens, num_heads, topk_width + swa_rows.shape[1]
    )
    partial = _partials(workspace, out, config.splits)
    head_blocks = triton.cdiv(num_heads, config.block_h)
    _decode_kernel[(num_tokens * config.splits * head_blocks * config.halves,)](
        q,
        kv_cache,
        swa_kv_cache,
        topk_rows,
        topk_lens,
        swa_rows,
        swa_lens,
        attn_sink,
        out,
        partial,
        num_heads,
        topk_width,
        swa_rows.shape[1],
        _num_slots(kv_cache),
        _num_slots(swa_kv_cache),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv_cache.stride(0),
        swa_kv_cache.stride(0),
        topk_rows.stride(0),
        swa_rows.stride(0),
        softmax_scale * LOG2E,
        KV_BLOCK_SIZE=kv_cache.shape[1],
        SWA_BLOCK_SIZE=swa_kv_cache.shape[1],
        HAS_TOPK=use_topk,
        HAS_SINK=attn_sink is not None,
        SPLITS=config.splits,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        HALVES=config.halves,
        GUARD_PV=config.guard_pv,
        **launch_options(q.device, config.num_warps, config.num_stages, config.grf),
    )
    if config.splits > 1:
        merge_splits(partial, attn_sink, out, config.splits)


def _check_head_dims(head_dim: int, nope_head_dim: int, rope_head_dim: int) -> None:
    for name, value, want in (
        ("head_dim", head_dim, HEAD_DIM),
        ("nope_head_dim", nope_head_dim, NOPE_DIM),
        ("rope_head_dim", rope_head_dim, ROPE_DIM),
    ):
        if value != want:
            fail(name, value, str(want))


def _check_queries(q: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
    """Check q and out; return tokens and heads."""
    for name, tensor in (("q", q), ("out", out)):
        check_dtype(name, tensor, torch.bfloat16)
        check_shape(name, tensor, None, None, HEAD_DIM)
        check_inner_contiguous(name, tensor)
    num_tokens, num_heads, _ = q.shape
    if not 1 <= num_heads <= 128:
        fail("q.shape[1]", num_heads, "1 to 128 heads")
    check_shape("out", out, num_tokens, num_heads, HEAD_DIM)
    return num_tokens, num_heads


def _num_slots(cache: torch.Tensor) -> int:
    """Slots of a cache that int32 can name."""
    return min(cache.shape[0] * cache.shape[1], 2**31 - 1)


def _partials(
    workspace: torch.Tensor | None, out: torch.Tensor, splits: int
) -> torch.Tensor:
    """The buffer of split partials; `out` stands in where there are none."""
    if splits == 1:
        return out
    size = out.shape[0] * out.shape[1] * splits * PARTIAL_WIDTH
    if workspace is None:
        return torch.empty(size, dtype=torch.float32, device=out.device)
    check_dtype("workspace", workspace, torch.float32)
    if workspace.numel() < size or not workspace.is_contiguous():
        fail(
            "workspace.shape",
            list(workspace.shape),
            f"a contiguous tensor of at least {size} elements",
        )
    return workspace
