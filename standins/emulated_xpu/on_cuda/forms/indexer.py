# SPDX-License-Identifier: Apache-2.0
"""The sparse indexer: query quantization, gather of keys, logits and top-k."""

import torch

from standins.emulated_xpu.on_cuda.forms.products import product
from standins.emulated_xpu.on_cuda.forms.table import device_form
from standins.emulated_xpu.ops.indexer import (
    check_logits,
    check_paged_logits,
    check_top_k,
)

ROWS = 1 << 27
"""How many products are in memory at once, in fp32."""


@device_form("_C_cache_ops::cp_gather_indexer_k_quant_cache")
def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """As the stand-in."""
    block_size, width = kv_cache.shape[1], dst_k.shape[1]
    pages = kv_cache.as_strided(
        (len(kv_cache), block_size * kv_cache.shape[2]), (kv_cache.stride(0), 1)
    )
    row = torch.arange(len(dst_k), device=dst_k.device)
    ends = cu_seq_lens[1:].contiguous()
    request = torch.searchsorted(ends, row.to(ends.dtype), right=True)
    inside = (request < len(ends))[:, None]
    request = request.clamp(max=len(ends) - 1)
    place = (row - cu_seq_lens[request]).clamp(min=0)
    column = (place // block_size).clamp(max=block_table.shape[1] - 1)
    page, place = block_table[request, column].long()[:, None], place % block_size
    for target, first in ((dst_k, 0), (dst_scale, block_size * width)):
        target = target.view(torch.uint8)
        count = target.shape[1]
        at = first + (place * count)[:, None]
        at = at + torch.arange(count, device=target.device)
        target.copy_(torch.where(inside, pages[page.clamp(min=0), at], target))


def scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums over heads of weight times the positive part of the product.

    Args:
        q: `[M, H, D]` in e4m3.
        keys: `[N, D]` in e4m3, without their scales.
        weights: `[M, H]` in fp32.

    Returns:
        `[M, N]` in fp32.
    """
    heads, turned = q.shape[1], keys.bfloat16().T
    step = max(ROWS // (heads * len(keys) + 1), 1)
    parts = []
    for first in range(0, len(q), step):
        rows = q[first : first + step].bfloat16()
        products = product(rows.flatten(0, 1), turned).relu_()
        products = products.view(len(rows), heads, -1)
        parts.append((weights[first : first + step, None] @ products)[:, 0])
    return torch.cat(parts) if parts else weights.new_empty(0, len(keys))


@device_form("_xpu_C::fp8_mqa_logits")
def fp8_mqa_logits(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
) -> torch.Tensor:
    """As the stand-in, with a key's scale applied to the sum."""
    check_logits(q, kv, kv_scales, weights, cu_seqlen_ks, cu_seqlen_ke)
    found = scores(q, kv, weights) * kv_scales.flatten()
    key = torch.arange(len(kv), device=kv.device)
    inside = (key >= cu_seqlen_ks[:, None]) & (key < cu_seqlen_ke[:, None])
    return found.where(inside, -torch.inf)


@device_form("_xpu_C::fp8_paged_mqa_logits")
def fp8_paged_mqa_logits(
    q_fp8: torch.Tensor,
    kv_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
) -> torch.Tensor:
    """As the stand-in, over all of `max_model_len` whatever the lengths are."""
    check_paged_logits(q_fp8, kv_cache_fp8, weights, context_lens, block_tables)
    requests, next_n, heads, dim = q_fp8.shape
    block_size = kv_cache_fp8.shape[1]
    pages = kv_cache_fp8.as_strided(
        (len(kv_cache_fp8), block_size * (dim + 4)), (kv_cache_fp8.stride(0), 1)
    )
    columns = min(-(-max_model_len // block_size), block_tables.shape[1])
    page = block_tables[:requests, :columns].long().clamp(0, len(pages) - 1)
    found = weights.new_full((requests, next_n, max_model_len), -torch.inf)
    keys_at_once = max(ROWS // (requests * next_n * heads), 1)
    step = max(keys_at_once // block_size, 1)
    q = q_fp8.bfloat16().flatten(1, 2)
    for first in range(0, columns, step):
        data = pages[page[:, first : first + step]]
        values = data[..., : block_size * dim].reshape(requests, -1, dim)
        scale = data[..., block_size * dim :].contiguous().view(torch.float32)
        keys = values.contiguous().view(torch.float8_e4m3fn).bfloat16()
        products = _batched(q, keys.transpose(1, 2)).relu_()
        products = products.view(requests, next_n, heads, -1)
        sums = (weights.view(requests, next_n, 1, heads) @ products)[:, :, 0]
        at = first * block_size
        count = min(sums.shape[-1], max_model_len - at)
        sums = sums * scale.reshape(requests, 1, -1)
        found[..., at : at + count] = sums[..., :count]
    key = torch.arange(max_model_len, device=found.device)
    last = context_lens[:, None, None] - next_n + 1
    row = torch.arange(next_n, device=found.device)[:, None]
    visible = key < last + row
    return found.where(visible, -torch.inf).flatten(0, 1)


def _batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[G, M, K] @ [G, K, N]` of bf16, in fp32."""
    return (
        torch.bmm(a, b, out_dtype=torch.float32)
        if not a.is_cpu
        else a.float() @ b.float()
    )


def _write_top(
    rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    indices: torch.Tensor,
    top_k: int,
) -> None:
    """Write the `top_k` best of `rows[i, starts[i]:ends[i]]` into `indices[i]`, as
    distances from the start, and -1 after them."""
    key = torch.arange(rows.shape[1], device=rows.device)
    starts, length = starts[:, None], (ends - starts).clamp(min=0)[:, None]
    inside = (key >= starts) & (key < starts + length)
    count = min(top_k, rows.shape[1])
    best = rows.where(inside, -torch.inf).topk(count, dim=-1).indices - starts
    best = torch.nn.functional.pad(best, (0, top_k - count), value=-1)
    order = torch.arange(top_k, device=rows.device)
    few = torch.where(order < length, order, -1)
    chosen = torch.where(length > top_k, best, few)
    indices.copy_(chosen)


@device_form("_C::top_k_per_row_prefill")
def top_k_per_row_prefill(
    logits: torch.Tensor,
    rowStarts: torch.Tensor,
    rowEnds: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """As the stand-in."""
    bounds = (rowStarts, numRows), (rowEnds, numRows)
    check_top_k(logits, (stride0, stride1), bounds, indices, (numRows, topK))
    _write_top(logits, rowStarts.long(), rowEnds.long(), indices, topK)


@device_form("_C::top_k_per_row_decode")
def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """As the stand-in."""
    bounds = ((seq_lens, numRows // next_n),)
    check_top_k(logits, (stride0, stride1), bounds, indices, (numRows, topK))
    row = torch.arange(numRows, device=logits.device)
    ends = seq_lens.flatten().long()[row // next_n] - next_n + row % next_n + 1
    _write_top(logits, torch.zeros_like(ends), ends, indices, topK)
