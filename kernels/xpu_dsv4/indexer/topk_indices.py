# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the positions that the indexer chose to the slots and rows for attention."""

import torch

from .._checks import (
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    fail,
)
from .._launch import cdiv, launch_options
from .._triton import tl, triton

WIDTH_MULTIPLE = 128
"""The number of combined indices per token is a multiple of this."""


@triton.jit(do_not_specialize=["num_requests", "table_width", "table_stride"])
def _global_topk_kernel(
    indices_ptr,
    requests_ptr,
    table_ptr,
    valid_ptr,
    out_ptr,
    lens_ptr,
    topk,
    num_requests,
    table_width,
    block_size,
    indices_stride,
    table_stride,
    out_stride,
    BLOCK_N: tl.constexpr,
):
    """The slots of one token, and their number."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(requests_ptr + token).to(tl.int64)
    is_valid = tl.load(valid_ptr + token).to(tl.int32) != 0
    has_request = is_valid & (request >= 0) & (request < num_requests)
    counts = tl.zeros((BLOCK_N,), tl.int32)  # [BLOCK_N]
    for start in range(0, topk, BLOCK_N):
        column_offs = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        column_mask = column_offs < topk  # [BLOCK_N]
        # [BLOCK_N]
        positions = tl.load(
            indices_ptr + token * indices_stride + column_offs,
            mask=column_mask & has_request,
            other=-1,
        )
        # [BLOCK_N]
        table_mask = (positions >= 0) & (positions // block_size < table_width)
        # [BLOCK_N]
        blocks = tl.load(
            table_ptr + request * table_stride + positions // block_size,
            mask=table_mask,
            other=-1,
        )
        slot_mask = table_mask & (blocks >= 0)  # [BLOCK_N]
        # [BLOCK_N]
        slots = tl.where(slot_mask, blocks * block_size + positions % block_size, -1)
        tl.store(out_ptr + token * out_stride + column_offs, slots, mask=column_mask)
        counts += slot_mask.to(tl.int32)
    tl.store(lens_ptr + token, tl.sum(counts, axis=0))


def _outputs(
    out: tuple[torch.Tensor, torch.Tensor] | None,
    tokens: int,
    width: int,
    like: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` after its check, or new int32 tensors `[tokens, width]` and `[tokens]`, on
    the device of `like`, which is `topk_indices`."""
    if out is None:
        rows = torch.empty((tokens, width), dtype=torch.int32, device=like.device)
        return rows, torch.empty(tokens, dtype=torch.int32, device=like.device)
    check_shape("out[0]", out[0], tokens, width)
    check_shape("out[1]", out[1], tokens)
    for name, tensor in (("out[0]", out[0]), ("out[1]", out[1])):
        check_dtype(name, tensor, torch.int32)
        check_inner_contiguous(name, tensor)
        check_same_device(**{"topk_indices": like, name: tensor})
    return out


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map positions within a request to cache slots and count them. One launch.

    Args:
        topk_indices (torch.Tensor):
            Compressed positions of shape `[T, K]`, int32; -1 for none.
        token_to_req_indices (torch.Tensor):
            Request of each token, of shape `[T]`, int32 or int64.
        block_table (torch.Tensor):
            Pages of each request, of shape `[R, W]`, int32.
        block_size (int):
            Compressed entries per page.
        is_valid_token (torch.Tensor):
            Whether each token is one, not padding, of shape `[T]`, bool or uint8.
        out (tuple[torch.Tensor, torch.Tensor] | None):
            (slots, lens) to write. None allocates.

    Returns:
        (slots, lens): slots of shape `[T, K]`, int32, each at the place of its
        position, and their number, of shape `[T]`, int32. A slot is -1 where the
        position is outside the table, the page is below 0, the request is out of range
        or the token is padding.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_shape("topk_indices", topk_indices, None, None)
    check_dtype("topk_indices", topk_indices, torch.int32)
    check_inner_contiguous("topk_indices", topk_indices)
    tokens, topk = topk_indices.shape
    check_shape("token_to_req_indices", token_to_req_indices, tokens)
    check_dtype("token_to_req_indices", token_to_req_indices, torch.int32, torch.int64)
    check_inner_contiguous("token_to_req_indices", token_to_req_indices)
    check_shape("block_table", block_table, None, None)
    check_dtype("block_table", block_table, torch.int32)
    check_inner_contiguous("block_table", block_table)
    if block_size < 1:
        fail("block_size", block_size, "at least 1")
    check_shape("is_valid_token", is_valid_token, tokens)
    check_dtype("is_valid_token", is_valid_token, torch.bool, torch.uint8)
    check_inner_contiguous("is_valid_token", is_valid_token)
    check_same_device(
        topk_indices=topk_indices,
        token_to_req_indices=token_to_req_indices,
        block_table=block_table,
        is_valid_token=is_valid_token,
    )
    slots, lens = _outputs(out, tokens, topk, topk_indices)
    if tokens:
        _global_topk_kernel[(tokens,)](
            topk_indices,
            token_to_req_indices,
            block_table,
            is_valid_token.view(torch.uint8),
            slots,
            lens,
            topk,
            block_table.shape[0],
            block_table.shape[1],
            block_size,
            topk_indices.stride(0),
            block_table.stride(0),
            slots.stride(0),
            BLOCK_N=512,
            **launch_options(topk_indices.device, num_warps=4),
        )
    return slots, lens


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "indices_width",
        "width",
        "request_rows",
        "compressed_rows",
        "indices_stride",
        "out_stride",
    ],
    do_not_specialize_on_alignment=[
        "query_starts_ptr",
        "seq_lens_ptr",
        "gather_lens_ptr",
        "left_ptr",
        "right_ptr",
    ],
)
def _combine_kernel(
    indices_ptr,
    query_starts_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    left_ptr,
    right_ptr,
    out_ptr,
    lens_ptr,
    num_requests,
    indices_width,
    width,
    topk,
    window,
    ratio,
    request_rows,
    compressed_rows,
    indices_stride,
    out_stride,
    HAS_IMAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The rows of one token, and their number."""
    token = tl.program_id(0).to(tl.int64)
    # The token's request is the number of requests that end before it.
    first_token = tl.load(query_starts_ptr)
    ended = tl.zeros((BLOCK_R,), tl.int32)  # [BLOCK_R]
    for start in range(0, num_requests, BLOCK_R):
        request_offs = start + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        request_mask = request_offs < num_requests  # [BLOCK_R]
        # [BLOCK_R]
        query_ends = (
            tl.load(query_starts_ptr + 1 + request_offs, mask=request_mask, other=0)
            - first_token
        )
        ended += (request_mask & (query_ends <= token)).to(tl.int32)
    request = tl.sum(ended, axis=0)
    in_batch = request < num_requests
    query_start = (
        tl.load(query_starts_ptr + request, mask=in_batch, other=0) - first_token
    )
    query_end = (
        tl.load(query_starts_ptr + request + 1, mask=in_batch, other=0) - first_token
    )
    seq_len = tl.load(seq_lens_ptr + request, mask=in_batch, other=0)
    gather_len = tl.load(gather_lens_ptr + request, mask=in_batch, other=0)
    position = seq_len - query_end + token.to(tl.int32)
    has_keys = in_batch & (position >= 0) & (token >= query_start)
    topk_len = tl.where(has_keys, tl.minimum((position + 1) // ratio, topk), 0)
    newest = position
    if HAS_IMAGES:
        window = tl.maximum(window, tl.load(left_ptr + token) + 1)
        newest += tl.maximum(tl.load(right_ptr + token), 0)
    visible_len = newest - position + tl.minimum(position + 1, window)
    window_len = tl.where(has_keys, tl.minimum(visible_len, width - topk_len), 0)
    num_rows = topk_len + window_len

    first_row = request * request_rows
    oldest_row = (
        first_row + compressed_rows + newest + 1 - window_len - (seq_len - gather_len)
    )
    for start in range(0, width, BLOCK_N):
        column_offs = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        # [BLOCK_N]
        positions = tl.load(
            indices_ptr + token * indices_stride + column_offs,
            mask=(column_offs < topk_len) & (column_offs < indices_width),
            other=-1,
        )
        rows = tl.where(positions >= 0, positions + first_row, -1)  # [BLOCK_N]
        window_mask = (column_offs >= topk_len) & (column_offs < num_rows)  # [BLOCK_N]
        rows = tl.where(window_mask, oldest_row + column_offs - topk_len, rows)
        tl.store(
            out_ptr + token * out_stride + column_offs, rows, mask=column_offs < width
        )
    tl.store(lens_ptr + token, num_rows)


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    left_visible: torch.Tensor | None = None,
    right_visible: torch.Tensor | None = None,
    max_image_tokens: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the gathered KV buffer that each prefill token reads. One launch.

    The buffer holds M rows per request: up to N compressed entries, then the last
    `gather_lens` raw tokens. A token at position p reads

    - its first `min((p + 1) // compress_ratio, topk)` chosen entries, then
    - the `min(p + 1, window_size)` raw tokens up to and including itself.

    A token of an image sees the whole image: its raw tokens begin at
    p - max(window_size - 1, left_visible), but not before 0, and end at
    p + right_visible. If these do not fit into the width, the oldest are left out.

    Args:
        topk_indices (torch.Tensor):
            Compressed positions of shape `[T, K]`, int32; -1 for none.
        query_start_loc (torch.Tensor):
            First token of each request, and the end of the last, of shape `[R + 1]`,
            int32; counted from its own first value.
        seq_lens (torch.Tensor):
            Tokens of each request, with the new ones, of shape `[R]`, int32.
        gather_lens (torch.Tensor):
            Raw tokens gathered for each request, of shape `[R]`, int32.
        window_size (int):
            Raw tokens that a token sees.
        compress_ratio (int):
            Raw tokens per compressed entry.
        topk (int):
            Compressed entries that a token sees at most; 0 in window-only layers.
        M (int):
            Rows per request in the buffer.
        N (int):
            First raw row of a request.
        out (tuple[torch.Tensor, torch.Tensor] | None):
            (indices, lens) to write. None allocates.
        left_visible (torch.Tensor | None):
            Tokens of the same image before each token, of shape `[T]`, int32; 0 outside
            images. None, with `right_visible`, for a batch without images.
        right_visible (torch.Tensor | None):
            Tokens of the same image after each token, as `left_visible`.
        max_image_tokens (int):
            Columns to add for images.

    Returns:
        (indices, lens): rows of shape `[T, width]`, int32, where width = topk +
        window_size + max_image_tokens, rounded up to a multiple of 128; and their
        number, of shape `[T]`, int32. Columns from that number on are -1. A token of no
        request has 0 rows.

    Raises:
        ValueError: naming the argument, its value and what was expected.

    """
    check_shape("topk_indices", topk_indices, None, None)
    check_dtype("topk_indices", topk_indices, torch.int32)
    check_inner_contiguous("topk_indices", topk_indices)
    tokens = topk_indices.shape[0]
    requests = seq_lens.shape[0]
    vectors = {
        "query_start_loc": (query_start_loc, requests + 1),
        "seq_lens": (seq_lens, requests),
        "gather_lens": (gather_lens, requests),
    }
    if left_visible is not None or right_visible is not None:
        for name, tensor in (
            ("left_visible", left_visible),
            ("right_visible", right_visible),
        ):
            if tensor is None:
                fail(name, None, "a tensor beside the other side's")
            vectors[name] = (tensor, tokens)
    for name, (tensor, size) in vectors.items():
        check_shape(name, tensor, size)
        check_dtype(name, tensor, torch.int32)
        check_inner_contiguous(name, tensor)
    sizes = {
        "window_size": window_size,
        "topk": topk,
        "max_image_tokens": max_image_tokens,
    }
    for name, value in sizes.items():
        if value < 0:
            fail(name, value, "at least 0")
    if compress_ratio < 1:
        fail("compress_ratio", compress_ratio, "at least 1")
    check_same_device(
        topk_indices=topk_indices,
        **{name: tensor for name, (tensor, _) in vectors.items()},
    )
    columns = topk + window_size + max_image_tokens
    width = cdiv(columns, WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    indices, lens = _outputs(out, tokens, width, topk_indices)
    if tokens:
        _combine_kernel[(tokens,)](
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            left_visible,
            right_visible,
            indices,
            lens,
            requests,
            topk_indices.shape[1],
            width,
            topk,
            window_size,
            compress_ratio,
            M,
            N,
            topk_indices.stride(0),
            indices.stride(0),
            HAS_IMAGES=left_visible is not None,
            BLOCK_R=256,
            BLOCK_N=256,
            **launch_options(topk_indices.device, num_warps=4),
        )
    return indices, lens
