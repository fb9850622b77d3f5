# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Dequantization of FP8 page tokens into bf16 rows, by block table."""

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from .._fp8 import (
    dequantize_exact,
    load_exponents,
    load_rope,
    token_pointers,
)
from .._launch import cdiv, launch_options
from .._pages import HEAD_DIM, NOPE_DIM, QUANT_BLOCK, ROPE_DIM, check_pages
from .._triton import tl, triton

PAGED_ROWS = 4
"""Rows per step of a gather by block table; with 8, its arithmetic spills on PVC."""


@triton.jit
def _store_rows(
    cache_ptr,
    slots,  # [BLOCK_M]
    slot_mask,  # [BLOCK_M]
    row_ptrs,  # [BLOCK_M]
    row_mask,  # [BLOCK_M]
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr = HEAD_DIM,
    NOPE_DIM: tl.constexpr = NOPE_DIM,
    ROPE_DIM: tl.constexpr = ROPE_DIM,
    QUANT_BLOCK: tl.constexpr = QUANT_BLOCK,
):
    """Dequantize slots into rows of `out`; where `slot_mask` is false, store zeros."""
    code_offs = tl.arange(0, HEAD_DIM)  # [HEAD_DIM], of which the first NOPE_DIM count
    dim_offs = tl.arange(0, ROPE_DIM)  # [ROPE_DIM]
    # [BLOCK_M] each
    data_ptrs, scale_ptrs = token_pointers(cache_ptr, slots, block_stride, BLOCK_SIZE)
    nope_mask = (code_offs < NOPE_DIM)[None, :]  # [1, HEAD_DIM]
    # [BLOCK_M, HEAD_DIM]
    codes = tl.load(
        data_ptrs[:, None] + code_offs[None, :],
        mask=slot_mask[:, None] & nope_mask,
        other=0,
    )
    words = load_exponents(scale_ptrs, slot_mask)[:, None]  # [BLOCK_M, 1]
    # [BLOCK_M, HEAD_DIM]
    exponents = (words >> (code_offs // QUANT_BLOCK * 8)[None, :]) & 0xFF
    values = dequantize_exact(codes, exponents.to(tl.int32))  # [BLOCK_M, HEAD_DIM]
    tl.store(
        row_ptrs[:, None] + code_offs[None, :],
        values,
        mask=row_mask[:, None] & nope_mask,
    )
    rope = load_rope(data_ptrs, dim_offs, slot_mask)  # [BLOCK_M, ROPE_DIM]
    tl.store(
        row_ptrs[:, None] + NOPE_DIM + dim_offs[None, :], rope, mask=row_mask[:, None]
    )


@triton.jit(
    do_not_specialize=[
        "offset",
        "max_rows",
        "num_blocks",
        "table_width",
        "out_request_stride",
        "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "seq_lens_ptr",
        "gather_lens_ptr",
        "block_table_ptr",
    ],
)
def _gather_paged_kernel(
    out_ptr,
    cache_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    block_table_ptr,
    offset,
    max_rows,
    num_blocks,
    table_width,
    out_request_stride,
    out_row_stride,
    block_stride,
    table_stride,
    HAS_GATHER_LENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    if HAS_GATHER_LENS:
        gather_len = tl.load(gather_lens_ptr + request).to(tl.int32)
    else:
        gather_len = seq_len
    first_position = seq_len - gather_len
    num_rows = tl.minimum(gather_len, max_rows)
    step = tl.num_programs(1) * BLOCK_M
    for start in range(tl.program_id(1) * BLOCK_M, num_rows, step):
        row_offs = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        position_offs = first_position + row_offs  # [BLOCK_M]
        row_mask = row_offs < num_rows  # [BLOCK_M]
        table_offs = position_offs // BLOCK_SIZE  # [BLOCK_M]
        # [BLOCK_M]
        table_mask = row_mask & (position_offs >= 0) & (table_offs < table_width)
        # [BLOCK_M]
        blocks = tl.load(
            block_table_ptr + request * table_stride + table_offs,
            mask=table_mask,
            other=-1,
        )
        slot_mask = (blocks >= 0) & (blocks < num_blocks)  # [BLOCK_M]
        # [BLOCK_M]
        slots = blocks.to(tl.int64) * BLOCK_SIZE + position_offs % BLOCK_SIZE
        request_ptr = out_ptr + request * out_request_stride
        # [BLOCK_M]
        row_ptrs = request_ptr + (offset + row_offs).to(tl.int64) * out_row_stride
        _store_rows(
            cache_ptr, slots, slot_mask, row_ptrs, row_mask, block_stride, BLOCK_SIZE
        )


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
) -> None:
    """Dequantize the last tokens of each request into consecutive rows of `out`.

    Row `offset + i` of request r takes the token at position
    `seq_lens[r] - gather_lens[r] + i`. Rows past the end of `out` are not written. A
    position that no valid block holds gives a row of zeros. One launch.

    Args:
        out (torch.Tensor):
            Rows of shape `[num_reqs or more, max_rows, 512]`, bf16, written in place.
        k_cache (torch.Tensor):
            FP8 pages of shape `[num_blocks, block_size, (1,) 584]`, uint8.
        seq_lens (torch.Tensor):
            Tokens of each request in the cache, of shape `[num_reqs]`, int32 or int64.
        gather_lens (torch.Tensor | None):
            Tokens of each request to gather, as `seq_lens`. None gathers all.
        block_table (torch.Tensor):
            Pages of each request, of shape `[num_reqs or more, max_blocks]`, int32 or
            int64.
        block_size (int):
            Tokens per page.
        offset (int):
            First row of each request to write.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_pages("k_cache", k_cache)
    if block_size != k_cache.shape[1]:
        fail("block_size", block_size, f"{k_cache.shape[1]}, that of k_cache")
    check_dtype("seq_lens", seq_lens, torch.int32, torch.int64)
    check_shape("seq_lens", seq_lens, None)
    check_inner_contiguous("seq_lens", seq_lens)
    num_reqs = seq_lens.shape[0]
    if gather_lens is not None:
        check_dtype("gather_lens", gather_lens, torch.int32, torch.int64)
        check_shape("gather_lens", gather_lens, num_reqs)
        check_inner_contiguous("gather_lens", gather_lens)
    check_dtype("block_table", block_table, torch.int32, torch.int64)
    check_shape("block_table", block_table, None, None)
    check_inner_contiguous("block_table", block_table)
    if block_table.shape[0] < num_reqs:
        fail("block_table.shape[0]", block_table.shape[0], f"at least {num_reqs}")
    check_dtype("out", out, torch.bfloat16)
    check_shape("out", out, None, None, HEAD_DIM)
    check_inner_contiguous("out", out)
    if out.shape[0] < num_reqs:
        fail("out.shape[0]", out.shape[0], f"at least {num_reqs}")
    if not 0 <= offset <= out.shape[1]:
        fail("offset", offset, f"0 to {out.shape[1]}, the rows of out")
    check_same_device(
        out=out,
        k_cache=k_cache,
        seq_lens=seq_lens,
        gather_lens=gather_lens,
        block_table=block_table,
    )
    max_rows = out.shape[1] - offset
    if num_reqs == 0 or max_rows == 0:
        return
    workers = min(cdiv(max_rows, PAGED_ROWS), max(2048 // num_reqs, 1))
    _gather_paged_kernel[(num_reqs, workers)](
        out,
        k_cache,
        seq_lens,
        gather_lens,
        block_table,
        offset,
        max_rows,
        k_cache.shape[0],
        block_table.shape[1],
        out.stride(0),
        out.stride(1),
        k_cache.stride(0),
        block_table.stride(0),
        HAS_GATHER_LENS=gather_lens is not None,
        BLOCK_SIZE=block_size,
        BLOCK_M=PAGED_ROWS,
        **launch_options(out.device, num_warps=4),
    )
