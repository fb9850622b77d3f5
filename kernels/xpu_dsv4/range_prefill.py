# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MLA prefill over keys that are ranges of gathered bf16 rows, in one launch."""

import torch

from ._checks import (
    check_dtype,
    check_inner_contiguous,
    check_once,
    check_same_device,
    check_shape,
    fail,
)
from ._launch import cdiv, has_aligned_rows, launch_options
from ._output import (
    Fp8Output,
    check_output,
    heads_per_group,
    output_arguments,
    tensors_of,
)
from ._pages import HEAD_DIM
from ._range_prefill_kernel import _range_prefill_kernel
from ._softmax import LOG2E, check_sink

MOST_HEADS = 16
"""Of a rank. With more, a single query fills a tile of matrix instructions."""
BLOCK_M, BLOCK_N, NUM_WARPS = 16, 64, 4


def takes_ranges(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Whether `xpu_range_prefill` takes these queries and rows: few heads, and no gaps
    in what 2-dim block loads read."""
    num_heads = q.shape[1]
    return num_heads <= MOST_HEADS and all(
        tensor.is_contiguous() and has_aligned_rows(tensor) for tensor in (q, kv)
    )


def xpu_range_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_row: int,
    window_size: int,
    compress_ratio: int,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    out: torch.Tensor | Fp8Output | None = None,
) -> torch.Tensor | Fp8Output:
    """Attention of each query over its window and all compressed keys before it.

    It is what `combine_topk_swa_indices` and `xpu_sparse_prefill` give together where
    no indexer chooses: the query at position p sees the first
    min((p + 1) // compress_ratio, window_row) rows of its request, and the rows of the
    last `window_size` positions up to p. Neighbours share them, so no list of indices
    is read. One launch. A key of NaN or infinity reaches the queries of its request
    that share a tile, also those that do not see it.

    Args:
        q (torch.Tensor):
            Queries, request after request, of shape `[num_tokens, num_heads, 512]`,
            bf16; see `takes_ranges`.
        kv (torch.Tensor):
            Rows of each request, of shape `[num_requests, rows, 512]`, bf16: compressed
            keys, then from `window_row` on the last positions.
        query_start_loc (torch.Tensor):
            First query of each request, and the one behind the last, of shape
            `[num_requests + 1]`, int32. Its first value counts as 0.
        seq_lens (torch.Tensor):
            Tokens of each request, these queries included, `[num_requests]`, int32.
        gather_lens (torch.Tensor):
            Positions that each request has from `window_row` on, the last ones, of
            shape `[num_requests]`, int32.
        window_row (int):
            Row of a request at which its positions begin; 0 without compressed keys.
        window_size (int):
            Positions that a query sees, its own included.
        compress_ratio (int):
            Positions for each compressed key; without such keys, any.
        sm_scale (float):
            Factor of q.k.
        attn_sink (torch.Tensor | None):
            Sinks of shape `[num_heads or more]`, fp32 or bf16, in natural-log units.
        out (torch.Tensor | Fp8Output | None):
            Where to write the attention, of shape `[num_tokens, num_heads, 512]`, bf16,
            or the operands of the product behind it. None allocates bf16.

    Returns:
        The attention, of the shape of `q`, bf16: `out` where it is given.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_once(
        _check,
        q,
        kv,
        query_start_loc,
        seq_lens,
        gather_lens,
        window_row,
        window_size,
        compress_ratio,
        attn_sink,
        *tensors_of(out),
    )
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = torch.empty_like(q)
    if num_tokens == 0:
        return out

    output = output_arguments(out)
    num_requests = kv.shape[0]
    # The last tile of each request may be a part.
    tiles = cdiv(num_tokens * num_heads, BLOCK_M) + num_requests - 1
    _range_prefill_kernel[(tiles,)](
        q,
        kv,
        query_start_loc,
        seq_lens,
        gather_lens,
        attn_sink,
        output.pointer,
        num_requests,
        num_heads,
        kv.shape[1],
        window_row,
        window_size,
        max(compress_ratio, 1),
        *output.strides,
        sm_scale * LOG2E,
        *output.operands,
        HAS_SINK=attn_sink is not None,
        HEADS_PER_GROUP=heads_per_group(out),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        **launch_options(q.device, NUM_WARPS, num_stages=1, grf=256),
    )
    return out


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_row: int,
    window_size: int,
    compress_ratio: int,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor | None,
    scales: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
) -> None:
    """Raise unless the arguments of `xpu_range_prefill` fit together."""
    check_dtype("q", q, torch.bfloat16)
    check_shape("q", q, None, None, HEAD_DIM)
    check_dtype("kv", kv, torch.bfloat16)
    check_shape("kv", kv, None, None, HEAD_DIM)
    num_tokens, num_heads, _ = q.shape
    num_requests, rows, _ = kv.shape
    if num_tokens and not takes_ranges(q, kv):
        fail(
            "q, kv",
            f"{list(q.shape)}, {list(kv.shape)}, strides {q.stride()}, {kv.stride()}",
            f"at most {MOST_HEADS} heads, no gaps, and a start at 64 bytes",
        )
    for name, tensor, size in (
        ("query_start_loc", query_start_loc, num_requests + 1),
        ("seq_lens", seq_lens, num_requests),
        ("gather_lens", gather_lens, num_requests),
    ):
        check_dtype(name, tensor, torch.int32)
        check_shape(name, tensor, size)
        check_inner_contiguous(name, tensor)
    for name, value, least in (
        ("window_size", window_size, 1),
        ("compress_ratio", compress_ratio, 0),
    ):
        if value < least:
            fail(name, value, f"{least} or more")
    if not 0 <= window_row <= rows:
        fail("window_row", window_row, f"from 0 to {rows}")
    check_sink(attn_sink, num_heads)
    if out is not None:
        check_output(num_tokens, num_heads, out, scales, positions, cos_sin_cache)
    check_same_device(
        q=q,
        kv=kv,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        gather_lens=gather_lens,
        attn_sink=attn_sink,
        out=out,
        scales=scales,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
    )
