# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA prefill over gathered bf16 keys, in one kernel."""

from typing import NamedTuple

import torch

from ._checks import (
    check_dtype,
    check_index_rows,
    check_inner_contiguous,
    check_once,
    check_same_device,
    check_shape,
    fail,
)
from ._dims_first import (
    TILE_DIM,
    attend,
    query_pointers,
    store_tile,
    zero_accumulator,
)
from ._launch import has_aligned_rows, launch_options
from ._pages import HEAD_DIM
from ._softmax import EMPTY_MAX, LOG2E, check_sink, softmax_factor, softmax_step
from ._triton import tl, triton
from ._tuned import tuned_rows


class PrefillConfig(NamedTuple):
    """How one prefill is divided into programs and tiles.

    Attributes:
        block_h: heads per tile.
        block_n: keys per tile.
        num_warps: warps per program; on XPU, sub-groups of 16 lanes.
        num_stages: depth of software pipelining.
        grf: registers per hardware thread on XPU, 128 or 256.
        dims_first: use the tile of `_dims_first`, for Intel GPUs. Otherwise q and one
            tile of keys are held whole for both products.
        q_blocks: load q by 2-dim blocks.

    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    grf: int
    dims_first: bool
    q_blocks: bool


class TunedPrefill(NamedTuple):
    """A measured configuration, for a range of heads; fields as in `PrefillConfig`.

    Attributes:
        least_heads: heads of `q` at least.
        most_heads: heads of `q` at most.

    """

    least_heads: int
    most_heads: int
    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    grf: int
    dims_first: bool
    q_blocks: bool

    def fits(self) -> bool:
        """Whether the kernel has this configuration."""
        return (
            self.least_heads <= self.most_heads
            and self.block_h in (16, 32, 64, 128)
            and self.block_n in (16, 32, 64)
            and self.num_warps in (1, 2, 4, 8, 16)
            and self.num_stages in (1, 2, 3, 4)
            and self.grf in (128, 256)
        )

    def config(self, aligned: bool) -> PrefillConfig:
        """This configuration for one launch; `aligned` as for `decode_config`."""
        return PrefillConfig(
            self.block_h,
            self.block_n,
            self.num_warps if aligned or not self.q_blocks else 2 * self.num_warps,
            self.num_stages,
            self.grf,
            self.dims_first,
            self.q_blocks and aligned,
        )


@triton.jit(do_not_specialize=["num_rows", "width", "indices_stride"])
def _prefill_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    lens_ptr,
    sink_ptr,
    out_ptr,
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
    HAS_LENS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIMS_FIRST: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    TILE_DIM: tl.constexpr = TILE_DIM,
    EMPTY_MAX: tl.constexpr = EMPTY_MAX,
):
    """One block of heads of one token."""
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // num_head_blocks).to(tl.int64)
    first_head = (tl.program_id(0) % num_head_blocks) * BLOCK_H
    head_offs = first_head + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    head_mask = head_offs < num_heads  # [BLOCK_H]
    tile_offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    all_offs = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    dim_offs = tl.arange(0, TILE_DIM)  # [64]

    row_mask = head_mask[:, None]  # [BLOCK_H, 1]
    token_q_ptr = q_ptr + token * q_token_stride
    if DIMS_FIRST:
        # [BLOCK_H, 64]
        q_ptrs = query_pointers(
            token_q_ptr,
            head_offs,
            first_head,
            num_heads,
            q_head_stride,
            BLOCK_H,
            Q_BLOCKS,
        )
    else:
        # [BLOCK_H, 1]
        q_row_ptrs = token_q_ptr + head_offs.to(tl.int64)[:, None] * q_head_stride
        # [BLOCK_H, HEAD_DIM]
        q = tl.load(q_row_ptrs + all_offs[None, :], mask=row_mask, other=0.0)

    if HAS_LENS:
        given_keys = tl.load(lens_ptr + token)
        num_keys = tl.minimum(tl.maximum(given_keys, 0), width).to(tl.int32)
    else:
        num_keys = width

    row_max = tl.full([BLOCK_H], EMPTY_MAX, tl.float32)  # [BLOCK_H]
    if DIMS_FIRST:
        column_sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # [BLOCK_H, BLOCK_N]
        # [64, BLOCK_H] each
        acc0 = zero_accumulator(BLOCK_H)
        acc1 = zero_accumulator(BLOCK_H)
        acc2 = zero_accumulator(BLOCK_H)
        acc3 = zero_accumulator(BLOCK_H)
        acc4 = zero_accumulator(BLOCK_H)
        acc5 = zero_accumulator(BLOCK_H)
        acc6 = zero_accumulator(BLOCK_H)
        acc7 = zero_accumulator(BLOCK_H)
    else:
        row_sum = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
        acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)  # [BLOCK_H, HEAD_DIM]
    index_row_ptr = indices_ptr + token * indices_stride
    # [BLOCK_N]
    next_rows = tl.load(index_row_ptr + tile_offs, mask=tile_offs < num_keys, other=-1)
    for start in range(0, num_keys, BLOCK_N):
        rows = next_rows  # [BLOCK_N]
        # One tile ahead, so that the loads of this tile's keys do not wait for it.
        next_offs = start + BLOCK_N + tile_offs  # [BLOCK_N]
        next_rows = tl.load(
            index_row_ptr + next_offs, mask=next_offs < num_keys, other=-1
        )
        valid_mask = (rows >= 0) & (rows < num_rows)  # [BLOCK_N]
        kv_row_ptrs = (kv_ptr + rows.to(tl.int64) * kv_stride)[:, None]  # [BLOCK_N, 1]
        kv_mask = valid_mask[:, None]  # [BLOCK_N, 1]
        if DIMS_FIRST:
            k_ptrs = kv_row_ptrs + dim_offs[None, :]  # [BLOCK_N, 64]
            # [BLOCK_N, 64] each
            k0 = tl.load(k_ptrs + 0 * TILE_DIM, mask=kv_mask, other=0.0)
            k1 = tl.load(k_ptrs + 1 * TILE_DIM, mask=kv_mask, other=0.0)
            k2 = tl.load(k_ptrs + 2 * TILE_DIM, mask=kv_mask, other=0.0)
            k3 = tl.load(k_ptrs + 3 * TILE_DIM, mask=kv_mask, other=0.0)
            k4 = tl.load(k_ptrs + 4 * TILE_DIM, mask=kv_mask, other=0.0)
            k5 = tl.load(k_ptrs + 5 * TILE_DIM, mask=kv_mask, other=0.0)
            k6 = tl.load(k_ptrs + 6 * TILE_DIM, mask=kv_mask, other=0.0)
            k7 = tl.load(k_ptrs + 7 * TILE_DIM, mask=kv_mask, other=0.0)
            (
                row_max,
                column_sums,
                acc0,
                acc1,
                acc2,
                acc3,
                acc4,
                acc5,
                acc6,
                acc7,
            ) = attend(
                q_ptrs,
                row_mask,
                k0,
                k1,
                k2,
                k3,
                k4,
                k5,
                k6,
                k7,
                valid_mask,
                qk_scale,
                start < num_keys,
                row_max,
                column_sums,
                acc0,
                acc1,
                acc2,
                acc3,
                acc4,
                acc5,
                acc6,
                acc7,
                BLOCK_H,
                BLOCK_N,
                Q_BLOCKS,
            )
        else:
            # [BLOCK_N, HEAD_DIM]
            kv = tl.load(kv_row_ptrs + all_offs[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(kv))  # [BLOCK_H, BLOCK_N]
            # The branch is for Triton on CUDA, measured with 3.6. Where the compiler
            # sees that one product feeds another, it lays the scores over all warps by
            # rows: with 64 heads both warp groups then compute every score. The branch
            # hides this. It is always taken, but `p` must use the scores on both paths.
            p = scores.to(tl.bfloat16)  # [BLOCK_H, BLOCK_N]
            rescale = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
            if start < num_keys:
                p, rescale, row_max, row_sum = softmax_step(
                    scores, valid_mask, qk_scale, row_max, row_sum
                )
            acc = tl.dot(p, kv, acc * rescale[:, None])

    if DIMS_FIRST:
        row_sum = tl.sum(column_sums, 1)  # [BLOCK_H]
        # A lane has a head here too, as in the accumulators. [1, BLOCK_H]
        factor = softmax_factor(
            row_max[None, :],
            row_sum[None, :],
            sink_ptr,
            head_offs[None, :],
            head_mask[None, :],
            HAS_SINK,
        )
    else:
        # [BLOCK_H, 1]
        factor = softmax_factor(
            row_max, row_sum, sink_ptr, head_offs, head_mask, HAS_SINK
        )[:, None]
    token_out_ptr = out_ptr + token * out_token_stride
    # [BLOCK_H, 1]
    out_row_ptrs = token_out_ptr + head_offs.to(tl.int64)[:, None] * out_head_stride
    if DIMS_FIRST:
        out_ptrs = out_row_ptrs + dim_offs[None, :]  # [BLOCK_H, 64]
        store_tile(out_ptrs + 0 * TILE_DIM, acc0, factor, row_mask)
        store_tile(out_ptrs + 1 * TILE_DIM, acc1, factor, row_mask)
        store_tile(out_ptrs + 2 * TILE_DIM, acc2, factor, row_mask)
        store_tile(out_ptrs + 3 * TILE_DIM, acc3, factor, row_mask)
        store_tile(out_ptrs + 4 * TILE_DIM, acc4, factor, row_mask)
        store_tile(out_ptrs + 5 * TILE_DIM, acc5, factor, row_mask)
        store_tile(out_ptrs + 6 * TILE_DIM, acc6, factor, row_mask)
        store_tile(out_ptrs + 7 * TILE_DIM, acc7, factor, row_mask)
    else:
        tl.store(
            out_row_ptrs + all_offs[None, :],
            (acc * factor).to(tl.bfloat16),
            mask=row_mask,
        )


def prefill_config(
    device_type: str, num_heads: int, aligned: bool = True
) -> PrefillConfig:
    """The configuration for one launch; arguments as for `decode_config`."""
    for row in tuned_rows(
        "sparse_prefill", device_type, TunedPrefill, TunedPrefill.fits
    ):
        if row.least_heads <= num_heads <= row.most_heads:
            return row.config(aligned)
    if device_type != "cuda":
        if num_heads <= 16:
            block_h, num_warps = 16, 8
        elif num_heads <= 32:
            block_h, num_warps = 32, 16
        else:
            block_h, num_warps = 64, 16 if aligned else 32
        return PrefillConfig(
            block_h,
            block_n=16,
            num_warps=num_warps,
            num_stages=1,
            grf=256,
            dims_first=True,
            q_blocks=aligned,
        )
    block_h, num_warps = (64, 8) if num_heads > 16 else (16, 4)
    return PrefillConfig(
        block_h,
        block_n=64,
        num_warps=num_warps,
        num_stages=2,
        grf=128,
        dims_first=False,
        q_blocks=False,
    )


def xpu_sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each query over the keys that its row of `indices` names.

    With s = sm_scale * q.k: out = sum(exp(s) * k) / (sum(exp(s)) + exp(sink)). A query
    without valid keys gives 0. One launch.

    Args:
        q (torch.Tensor):
            Queries of shape `[num_tokens, num_heads, 512]`, bf16.
        kv (torch.Tensor):
            Keys, which are the values as well, of shape `[num_rows, 1, 512]`, bf16.
        indices (torch.Tensor):
            Rows of `kv`, of shape `[num_tokens, (1,) topk]`, int32 or int64. Entries
            outside `[0, num_rows)` are skipped.
        sm_scale (float):
            Factor of q.k.
        attn_sink (torch.Tensor | None):
            Sinks of shape `[num_heads or more]`, fp32 or bf16, in natural-log units.
        topk_length (torch.Tensor | None):
            Entries of each row of `indices` that count, the first ones, of shape
            `[num_tokens]`, int32 or int64; clamped to the width. None counts all.
        out (torch.Tensor | None):
            Where to write the attention, of shape `[num_tokens, num_heads, 512]`, bf16.
            None allocates.

    Returns:
        The attention, of the shape of `q`, bf16: `out` where it is given.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_once(_check, q, kv, indices, attn_sink, topk_length, out)
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out

    config = prefill_config(q.device.type, num_heads, has_aligned_rows(q))
    head_blocks = triton.cdiv(num_heads, config.block_h)
    _prefill_kernel[(num_tokens * head_blocks,)](
        q,
        kv,
        indices,
        topk_length,
        attn_sink,
        out,
        num_heads,
        kv.shape[0],
        indices.shape[-1],
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        indices.stride(0),
        out.stride(0),
        out.stride(1),
        sm_scale * LOG2E,
        HAS_LENS=topk_length is not None,
        HAS_SINK=attn_sink is not None,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        DIMS_FIRST=config.dims_first,
        Q_BLOCKS=config.q_blocks,
        **launch_options(q.device, config.num_warps, config.num_stages, config.grf),
    )
    return out


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Raise unless the arguments of `xpu_sparse_prefill` fit together."""
    check_dtype("q", q, torch.bfloat16)
    check_shape("q", q, None, None, HEAD_DIM)
    num_tokens, num_heads, _ = q.shape
    if num_heads < 1:
        fail("q.shape[1]", num_heads, "at least one head")
    check_inner_contiguous("q", q)
    check_dtype("kv", kv, torch.bfloat16)
    check_shape("kv", kv, None, 1, HEAD_DIM)
    check_inner_contiguous("kv", kv)
    check_index_rows("indices", indices, num_tokens)
    check_sink(attn_sink, num_heads)
    if topk_length is not None:
        check_dtype("topk_length", topk_length, torch.int32, torch.int64)
        check_shape("topk_length", topk_length, num_tokens)
        check_inner_contiguous("topk_length", topk_length)
    if out is not None:
        check_dtype("out", out, torch.bfloat16)
        check_shape("out", out, *q.shape)
        check_inner_contiguous("out", out)
    check_same_device(
        q=q,
        kv=kv,
        indices=indices,
        attn_sink=attn_sink,
        topk_length=topk_length,
        out=out,
    )
