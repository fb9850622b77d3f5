# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Dequantizing FP8 page tokens into bf16 rows: by slot, and by block table."""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_range,
    check_same_device,
    check_shape,
    fail,
)
from ._fp8 import (
    dequantize_exact,
    load_exponents,
    load_rope,
    token_pointers,
)
from ._launch import launch_options
from ._pages import HEAD_DIM, as_pages
from ._triton import tl, triton

ROWS = 8
PAGED_ROWS = 4
"""Fewer than ROWS: the block table's arithmetic would spill on PVC."""


@triton.jit
def _store_rows(cache_ptr, slot, valid, rows_ptr, rows, block_stride, BLOCK_SIZE):
    """Dequantize `slot` into `rows_ptr`; rows that are not valid become zero."""
    codes_dims = tl.arange(0, 512)
    dims = tl.arange(0, 64)
    data, exponents_ptr = token_pointers(cache_ptr, slot, block_stride, BLOCK_SIZE)
    is_nope = (codes_dims < 448)[None, :]
    codes = tl.load(
        data[:, None] + codes_dims[None, :], mask=valid[:, None] & is_nope, other=0
    )
    exponents = load_exponents(exponents_ptr, valid)[:, None]
    byte = (exponents >> (codes_dims // 64 * 8)[None, :]) & 0xFF
    values = dequantize_exact(codes, byte.to(tl.int32))
    tl.store(
        rows_ptr[:, None] + codes_dims[None, :], values, mask=rows[:, None] & is_nope
    )
    rope = load_rope(data, dims, valid)
    tl.store(rows_ptr[:, None] + 448 + dims[None, :], rope, mask=rows[:, None])


@triton.jit
def _gather_slots_kernel(
    out_ptr,
    cache_ptr,
    indices_ptr,
    num_rows,
    num_slots,
    out_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(indices_ptr + row, mask=row < num_rows, other=-1)
    valid = (slot >= 0) & (slot < num_slots)
    rows_ptr = out_ptr + row.to(tl.int64) * out_stride
    _store_rows(
        cache_ptr, slot, valid, rows_ptr, row < num_rows, block_stride, BLOCK_SIZE
    )


@triton.jit
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
    out_req_stride,
    out_row_stride,
    block_stride,
    table_stride,
    HAS_GATHER_LENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    gather_len = seq_len
    if HAS_GATHER_LENS:
        gather_len = tl.load(gather_lens_ptr + request).to(tl.int32)
    first = seq_len - gather_len
    last_row = tl.minimum(gather_len, max_rows)
    step = tl.num_programs(1) * ROWS
    for start in range(tl.program_id(1) * ROWS, last_row, step):
        row = start + tl.arange(0, ROWS)
        position = first + row
        in_rows = row < last_row
        logical = position // BLOCK_SIZE
        known = in_rows & (position >= 0) & (logical < table_width)
        block = tl.load(
            block_table_ptr + request * table_stride + logical, mask=known, other=-1
        )
        valid = (block >= 0) & (block < num_blocks)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        rows_ptr = out_ptr + request * out_req_stride
        rows_ptr += (offset + row).to(tl.int64) * out_row_stride
        _store_rows(cache_ptr, slot, valid, rows_ptr, in_rows, block_stride, BLOCK_SIZE)


def dequant_gather_slots(
    out: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    cache_block_size: int,
) -> None:
    """Dequantize the tokens at `indices` into the rows of `out`.

    A slot outside `[0, slots)` gives a row of zeros and nothing is read for it.

    Args:
        out: `[at least num_rows, 512]`, bf16, written in place.
        cache: `[num_blocks, cache_block_size, (1,) 584]` uint8 FP8 pages.
        indices: global slots, `[num_rows]`, int32 or int64.
        cache_block_size: tokens a page.

    Raises:
        ValueError: an argument has a wrong dtype, shape, stride, device or size.

    """
    cache = as_pages("cache", cache)
    if cache_block_size != cache.shape[1]:
        fail("cache_block_size", cache_block_size, f"{cache.shape[1]}, that of cache")
    check_dtype("indices", indices, torch.int32, torch.int64)
    check_shape("indices", indices, None)
    check_inner_contiguous("indices", indices)
    num_rows = indices.shape[0]
    check_dtype("out", out, torch.bfloat16)
    check_shape("out", out, None, HEAD_DIM)
    if out.shape[0] < num_rows:
        fail("out.shape[0]", out.shape[0], f"at least {num_rows} rows")
    check_inner_contiguous("out", out)
    check_same_device(out=out, cache=cache, indices=indices)
    if num_rows == 0:
        return
    _gather_slots_kernel[(triton.cdiv(num_rows, ROWS),)](
        out,
        cache,
        indices,
        num_rows,
        cache.shape[0] * cache.shape[1],
        out.stride(0),
        cache.stride(0),
        BLOCK_SIZE=cache_block_size,
        ROWS=ROWS,
        **launch_options(out.device, num_warps=4),
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
    `seq_lens[r] - gather_lens[r] + i`. Rows past the end of `out` are not written; a
    position that no valid block holds gives a row of zeros.

    Args:
        out: `[at least num_reqs, max_rows, 512]`, bf16, written in place.
        k_cache: `[num_blocks, block_size, (1,) 584]` uint8 FP8 pages.
        seq_lens: tokens in the cache, `[num_reqs]`, int32 or int64.
        gather_lens: tokens to gather, `[num_reqs]`; None gathers all.
        block_table: pages of each request, `[at least num_reqs, max_blocks]`.
        block_size: tokens a page.
        offset: first row of `out` to write.

    Raises:
        ValueError: an argument has a wrong dtype, shape, stride, device or size.

    """
    k_cache = as_pages("k_cache", k_cache)
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
    check_range("seq_lens", seq_lens, 0, block_table.shape[1] * block_size + 1)
    max_rows = out.shape[1] - offset
    if num_reqs == 0 or max_rows == 0:
        return
    workers = min(triton.cdiv(max_rows, PAGED_ROWS), max(2048 // num_reqs, 1))
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
        ROWS=PAGED_ROWS,
        **launch_options(out.device, num_warps=4),
    )
