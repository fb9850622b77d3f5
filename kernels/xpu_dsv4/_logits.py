# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Argument checks, the result and the launches that the indexer's score ops share."""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_range,
    check_shape,
    fail,
)
from ._fp4 import MXFP4_BLOCK
from ._launch import launch_options
from ._logits_kernels import mqa_logits_kernel, paged_mqa_logits_kernel
from ._triton import triton

MOST_HEADS = 128
_ROWS, _KEYS = 8, 64


def check_heads(q: torch.Tensor, name: str, weights: torch.Tensor) -> None:
    """Raise unless `q` is `[..., H, D]` and `weights` fp32 `[rows of q, H]`."""
    check_inner_contiguous(name, q)
    heads = q.shape[-2]
    if not 1 <= heads <= MOST_HEADS:
        fail(f"{name}.shape[-2]", heads, f"1 to {MOST_HEADS} heads")
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, q.shape[:-2].numel(), heads)
    check_inner_contiguous("weights", weights)


def check_bounds(
    cu_seqlen_ks: torch.Tensor, cu_seqlen_ke: torch.Tensor, rows: int, num_keys: int
) -> dict[str, torch.Tensor]:
    """Both by name; raise unless they are int32 `[rows]` from 0 to `num_keys`."""
    bounds = {"cu_seqlen_ks": cu_seqlen_ks, "cu_seqlen_ke": cu_seqlen_ke}
    for name, bound in bounds.items():
        check_dtype(name, bound, torch.int32)
        check_shape(name, bound, rows)
        check_inner_contiguous(name, bound)
        check_range(name, bound, 0, num_keys + 1)
    return bounds


def key_pages(name: str, cache: torch.Tensor, width: int, word: int) -> torch.Tensor:
    """`[num_blocks, block_size, width]` view of uint8 pages without gaps inside.

    Pages start at multiples of `word` bytes; an axis of one head is dropped.
    """
    check_dtype(name, cache, torch.uint8)
    pages = cache.squeeze(2) if cache.dim() == 4 and cache.shape[2] == 1 else cache
    check_shape(name, pages, None, None, width)
    check_inner_contiguous(name, pages)
    block_size = pages.shape[1]
    if block_size < 1 or (block_size > 1 and pages.stride(1) != width):
        fail(f"{name}.stride()", cache.stride(), "pages without gaps inside")
    if pages.stride(0) % word or pages.storage_offset() % word:
        fail(f"{name}.stride(0)", pages.stride(0), f"{word}-byte words in every page")
    return pages


def check_context(
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    requests: int,
    next_n: int,
    max_model_len: int,
) -> bool:
    """Check lengths and block tables; return whether each row has its own length."""
    check_dtype("context_lens", context_lens, torch.int32)
    per_row = context_lens.dim() == 2 and context_lens.shape[1] == next_n
    if context_lens.dim() > 2 or not (per_row or context_lens.numel() == requests):
        fail("context_lens.shape", list(context_lens.shape), f"[{requests}, {next_n}]")
    if per_row:
        check_inner_contiguous("context_lens", context_lens)
    check_shape("block_tables", block_tables, requests, None)
    check_dtype("block_tables", block_tables, torch.int32)
    check_inner_contiguous("block_tables", block_tables)
    if max_model_len < 0:
        fail("max_model_len", max_model_len, "at least 0")
    check_range("context_lens", context_lens, 0, max_model_len + 1)
    return per_row


def output(
    out: torch.Tensor | None, rows: int, width: int, device: torch.device
) -> torch.Tensor:
    """`out` after its check, or a new fp32 tensor `[rows, width]`."""
    if out is None:
        return torch.empty((rows, width), dtype=torch.float32, device=device)
    check_dtype("out", out, torch.float32)
    check_shape("out", out, rows, width)
    check_inner_contiguous("out", out)
    return out


def score_rows(
    q: torch.Tensor,
    q_scales: torch.Tensor | None,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Fill `logits` with the scores of rows over gathered keys, in one launch.

    Arguments are those of `fp8_mqa_logits` or, with `q_scales`, of `mxfp4_mqa_logits`.
    """
    rows, heads, width = q.shape
    num_keys = kv.shape[0]
    fp4 = q_scales is not None
    if not (rows and num_keys):
        return
    mqa_logits_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(num_keys, _KEYS))](
        q.view(torch.uint8),
        q_scales,
        kv.view(torch.uint8),
        kv_scales,
        weights,
        cu_seqlen_ks,
        cu_seqlen_ke,
        logits,
        rows,
        num_keys,
        heads,
        q.stride(0),
        q.stride(1),
        0 if q_scales is None else q_scales.stride(0),
        kv.stride(0),
        weights.stride(0),
        logits.stride(0),
        ROWS=_ROWS,
        KEYS=_KEYS,
        HEADS=_padded(heads),
        DIM=2 * width if fp4 else width,
        BLOCK=MXFP4_BLOCK,
        FP4=fp4,
        **launch_options(q.device, num_warps=8, grf=256),
    )


def score_pages(
    q: torch.Tensor,
    q_scales: torch.Tensor | None,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    per_row: bool,
    logits: torch.Tensor,
) -> None:
    """Fill `logits` with the scores of tokens over paged keys, in one launch.

    Arguments are those of `fp8_paged_mqa_logits` or, with `q_scales`, of
    `mxfp4_paged_mqa_logits`; `cache` is that of `key_pages`, and `per_row` says that
    `context_lens` has a length for each row.
    """
    requests, next_n, heads, width = q.shape
    max_model_len = logits.shape[1]
    fp4 = q_scales is not None
    if not (requests and next_n and max_model_len):
        return
    paged_mqa_logits_kernel[(requests, triton.cdiv(max_model_len, _KEYS))](
        q.view(torch.uint8),
        q_scales,
        cache,
        weights,
        context_lens,
        block_tables,
        logits,
        cache.shape[0],
        heads,
        max_model_len,
        block_tables.shape[1],
        cache.stride(0),
        q.stride(0),
        q.stride(1),
        q.stride(2),
        0 if q_scales is None else q_scales.stride(0),
        0 if q_scales is None else q_scales.stride(1),
        weights.stride(0),
        context_lens.stride(0),
        block_tables.stride(0),
        logits.stride(0),
        NEXT_N=next_n,
        BLOCK_SIZE=cache.shape[1],
        KEYS=_KEYS,
        HEADS=_padded(heads),
        DIM=2 * width if fp4 else width,
        BLOCK=MXFP4_BLOCK,
        ROW_LENS=per_row,
        FP4=fp4,
        **launch_options(q.device, num_warps=8, grf=256),
    )


def _padded(heads: int) -> int:
    """Rows of the matrix product that hold `heads`."""
    return max(16, triton.next_power_of_2(heads))
