# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Argument checks and the result that the indexer's score ops share."""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_range,
    check_shape,
    fail,
)

MOST_HEADS = 128


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
